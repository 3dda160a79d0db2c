/** The icons: lines on a field of 24 by 24. */

const SVG = "http://www.w3.org/2000/svg";
const FILLED = ["stop", "more"];

/** @type {Record<string, string>} name -> path */
const PATHS = {
  chat: "M5 5h14a2 2 0 0 1 2 2v8a2 2 0 0 1-2 2h-7l-5 4v-4H5a2 2 0 0 1-2-2V7a2 2 0 0 1 2-2z",
  batch: "M4 4h7v7H4zM13 4h7v7h-7zM4 13h7v7H4zM13 13h7v7h-7z",
  translate: "M3 6h10M8 3v3M5 6c.5 4 3 7 7 9M11 6c-.5 4-3 7-7 9M12 21l4.5-11L21 21M13.7 17h5.6",
  figures: "M3 20h18M6 16v-5M11 16V5M16 16V8M20.5 16v-3",
  plus: "M12 5v14M5 12h14",
  fork: "M7 8.5v7M17 8.5c0 5-10 2-10 7M7 3.5a2.5 2.5 0 1 0 0 5 2.5 2.5 0 0 0 0-5zM7 15.5a2.5 2.5 0 1 0 0 5 2.5 2.5 0 0 0 0-5zM17 3.5a2.5 2.5 0 1 0 0 5 2.5 2.5 0 0 0 0-5z",
  rewind: "M8 5 3.5 9.5 8 14M4 9.5h10a6 6 0 0 1 0 12h-3",
  export: "M12 4v11M7.5 10.5 12 15l4.5-4.5M4 19.5h16",
  import: "M12 15V4M7.5 8.5 12 4l4.5 4.5M4 19.5h16",
  delete: "M4 7h16M9 7V4h6v3M6.5 7l1 13h9l1-13M10 11v5M14 11v5",
  more: "M5 11.3a.7.7 0 1 0 .01 0zM12 11.3a.7.7 0 1 0 .01 0zM19 11.3a.7.7 0 1 0 .01 0z",
  edit: "M4 20l1-4.5L16 4.5l3.5 3.5L8.5 19zM13.5 7l3.5 3.5",
  again: "M19.5 12a7.5 7.5 0 1 1-2.2-5.3L20 9.5M20 4v5.5h-5.5",
  file: "M6 3h8l4 4v14H6zM14 3v4h4M9 12h6M9 16h6",
  attach: "M19 11.5 12 18.5a4.6 4.6 0 0 1-6.5-6.5l7.5-7.5a3 3 0 0 1 4.3 4.3L10 16a1.5 1.5 0 0 1-2.1-2.1l6.4-6.4",
  before: "M14.5 6 8.5 12l6 6",
  after: "M9.5 6l6 6-6 6",
  close: "M6 6l12 12M18 6 6 18",
  copy: "M8 8h12v12H8zM16 8V4H4v12h4",
  send: "M12 20V5M5.5 11 12 4.5l6.5 6.5",
  stop: "M7 7h10v10H7z",
  think: "M9 18h6M10 21h4M8.5 15.5C6.5 14 5.5 12 5.5 9.7a6.5 6.5 0 0 1 13 0c0 2.3-1 4.3-3 5.8z",
  options: "M4 7h9M19 7h1M4 17h1M11 17h9M16 4.5v5M8 14.5v5",
  swap: "M4 8h15M15 4l4 4-4 4M20 16H5M9 12l-4 4 4 4",
  down: "M12 5v14M5.5 12.5 12 19l6.5-6.5",
  list: "M4 6h16M4 12h16M4 18h10",
  light:
    "M12 8a4 4 0 1 0 0 8 4 4 0 0 0 0-8zM12 2v2M12 20v2M2 12h2M20 12h2M5 5l1.4 1.4M17.6 17.6 19 19M19 5l-1.4 1.4M6.4 17.6 5 19",
  dark: "M20 14.5A8.5 8.5 0 0 1 9.5 4a8.5 8.5 0 1 0 10.5 10.5z",
  auto: "M12 3a9 9 0 1 0 0 18 9 9 0 0 0 0-18zM12 3v18M9 4v16M6 6v12",
};

/** An icon, which says nothing to screen readers. */
export function icon(name) {
  const svg = document.createElementNS(SVG, "svg");
  const path = document.createElementNS(SVG, "path");
  svg.setAttribute("class", FILLED.includes(name) ? "icon filled" : "icon");
  svg.setAttribute("viewBox", "0 0 24 24");
  svg.setAttribute("aria-hidden", "true");
  path.setAttribute("d", PATHS[name]);
  svg.append(path);
  return svg;
}

/** Put the icons into the elements that name one. */
export function drawIcons(root) {
  for (const element of root.querySelectorAll("[data-icon]")) element.prepend(icon(element.dataset.icon));
}
