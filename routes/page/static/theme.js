/* The chosen theme, before anything is painted. It is no module, as modules run after the first paint. */
(() => {
  const chosen = localStorage.getItem("theme");
  if (chosen === "light" || chosen === "dark") document.documentElement.dataset.theme = chosen;
})();
