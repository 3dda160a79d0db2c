/** The page: its views, language and theme, and the start of everything. */

import { announce } from "./announce.js";
import { openSession, shownSession, startChat } from "./chat.js";
import { startBatch } from "./batch.js";
import { connection } from "./connection.js";
import { byId } from "./dom.js";
import { renderFigures, showFigures, startFigures } from "./figures.js";
import { drawIcons, icon } from "./icons.js";
import { chosenModel, loadModels, models, startModels } from "./models.js";
import { passwords } from "./password.js";
import { loadSessions, relabelSessions, reported, sessions, startSessions } from "./sessions.js";
import { language, localize, setLanguage, text } from "./texts.js";
import { relabelLanguages, startTranslate } from "./translate.js";

const VIEWS = ["chat", "batch", "translate", "figures"];
const THEMES = ["auto", "light", "dark"];
const NARROW = matchMedia("(max-width: 52rem)");

/** Show what the address names: "#batch", or "#chat/" with the id of a session. */
function route() {
  const [name, ...rest] = location.hash.slice(1).split("/");
  const view = VIEWS.includes(name) ? name : "chat";
  show(view);
  if (view === "chat" && rest.length && sessionOf(rest) !== shownSession()) openSession(sessionOf(rest));
}

function show(view) {
  const before = document.body.dataset.view;
  document.body.dataset.view = view;
  for (const each of VIEWS) byId(each).hidden = each !== view;
  for (const link of document.querySelectorAll(".views a")) {
    if (link.hash === `#${view}`) link.setAttribute("aria-current", "page");
    else link.removeAttribute("aria-current");
  }
  document.title = `${text(view)} · RWKV`;
  drawer(false);
  showFigures(view === "figures");
  if (before !== undefined && before !== view) byId(view).querySelector("h2").focus();
}

/** @returns {string | null} */
function sessionOf(parts) {
  try {
    return decodeURIComponent(parts.join("/")) || null;
  } catch {
    return null;
  }
}

function open(id) {
  const hash = id === null ? "#chat" : `#chat/${encodeURIComponent(id)}`;
  if (location.hash !== hash) history.pushState(null, "", hash);
  show("chat");
  openSession(id);
}

/** On a narrow screen the sessions are a drawer. */
function drawer(shown) {
  byId("sessions").classList.toggle("open", shown);
  byId("drawer").setAttribute("aria-expanded", String(shown));
  if (shown) byId("new-chat").focus();
}

function speak(name) {
  setLanguage(name);
  byId("language").lang = name === "en" ? "zh-Hans" : "en"; // its text is in the other one
  document.title = `${text(document.body.dataset.view ?? "chat")} · RWKV`;
}

function theme() {
  return THEMES.includes(localStorage.getItem("theme")) ? localStorage.getItem("theme") : "auto";
}

function showTheme() {
  const name = theme();
  const key = `theme${name[0].toUpperCase()}${name.slice(1)}`;
  if (name === "auto") delete document.documentElement.dataset.theme;
  else document.documentElement.dataset.theme = name;
  const button = byId("theme");
  button.dataset.label = button.dataset.tip = key;
  button.replaceChildren(icon(name));
  localize(button.parentElement);
}

function startTools() {
  byId("language").addEventListener("click", () => {
    const name = language() === "en" ? "zh" : "en";
    localStorage.setItem("language", name);
    speak(name);
    relabelLanguages();
    relabelSessions();
    renderFigures();
  });
  byId("theme").addEventListener("click", () => {
    localStorage.setItem("theme", THEMES[(THEMES.indexOf(theme()) + 1) % THEMES.length]);
    showTheme();
    announce(text(byId("theme").dataset.label));
  });
  byId("drawer").addEventListener("click", () => drawer(!byId("sessions").classList.contains("open")));
  document.addEventListener("keydown", (event) => {
    if (event.key === "Escape" && NARROW.matches && byId("sessions").classList.contains("open")) {
      drawer(false);
      byId("drawer").focus();
    }
  });
  document.querySelector(".skip").addEventListener("click", (event) => {
    event.preventDefault();
    byId("main").focus();
  });
}

let beginning = false;

/** Ask the server what it serves and stores. */
async function begin() {
  beginning = true;
  try {
    await loadModels();
    await loadSessions();
  } finally {
    beginning = false;
  }
}

/** It may be that nobody gave a password when the page began. */
function beginLate() {
  if (!beginning && !chosenModel()) reported(begin);
}

drawIcons(document);
speak(localStorage.getItem("language") ?? (navigator.language.startsWith("zh") ? "zh" : "en"));
showTheme();
startTools();
startModels();
startSessions();
startChat();
startBatch();
startTranslate();
sessions.addEventListener("open", ({ detail }) => open(detail));
models.addEventListener("change", () => {
  reported(loadSessions);
  openSession(null);
  if (document.body.dataset.view === "chat") history.replaceState(null, "", "#chat");
});
connection.addEventListener("back", () => reported(begin));
passwords.addEventListener("given", beginLate);
window.addEventListener("hashchange", route);
await reported(begin);
openSession(null);
route();
startFigures();
