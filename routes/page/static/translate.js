/** Translation side by side: each line is a text of one batch. */

import { json } from "./api.js";
import { announce } from "./announce.js";
import { copyText } from "./clipboard.js";
import { byId, isComposing, make, showOneOf } from "./dom.js";
import { chosenModel } from "./models.js";
import { language, text } from "./texts.js";

const LANGUAGES = ["en", "zh-CN", "zh-TW", "ja", "ko", "fr", "de", "es", "ru"];
const SCRIPTS = { "zh-CN": "zh-Hans", "zh-TW": "zh-Hant" }; // whose names say more
const AUTO = "auto";
let running = null; // the AbortController of the translation on its way

async function translate() {
  const lines = byId("source").value.split("\n");
  if (!lines.some((line) => line.trim())) return;
  running?.abort();
  const mine = (running = new AbortController());
  problem("");
  busy(true);
  announce(text("translating"));
  try {
    const body = {
      model: chosenModel(),
      source_lang: byId("source-language").value,
      target_lang: byId("target-language").value,
      text_list: lines,
    };
    const { translations } = await json("translate/v1/batch-translate", { body, signal: mine.signal });
    const made = translations.map((each) => make("p", { content: each.text || "\u00a0" }));
    byId("result").replaceChildren(...made);
    byId("result").lang = byId("target-language").value;
    byId("copy-result").hidden = false;
    announce(text("translated", { count: lines.length }));
  } catch (error) {
    if (error.name !== "AbortError") problem(error.message);
  } finally {
    if (running === mine) {
      running = null;
      busy(false);
    }
  }
}

function swap() {
  const [source, target] = [byId("source-language"), byId("target-language")];
  const before = source.value;
  source.value = target.value;
  target.value = before === AUTO ? (source.value === "en" ? "zh-CN" : "en") : before;
  const made = [...byId("result").children].map((line) => line.textContent.trim());
  if (!made.length) return;
  byId("source").value = made.join("\n");
  byId("result").replaceChildren();
}

/** The choices of languages, by their names in the page's own. */
export function relabelLanguages() {
  const names = new Intl.DisplayNames(language(), { type: "language" });
  for (const select of [byId("source-language"), byId("target-language")]) {
    for (const option of select.options) {
      if (option.value !== AUTO) option.textContent = names.of(SCRIPTS[option.value] ?? option.value);
    }
  }
}

function busy(is) {
  if (is) showOneOf(byId("translate-stop"), byId("translate-run"));
  else showOneOf(byId("translate-run"), byId("translate-stop"));
  byId("result").setAttribute("aria-busy", String(is));
}

function problem(message) {
  byId("translate-problem").textContent = message;
  byId("translate-problem").hidden = !message;
}

export function startTranslate() {
  const options = () => LANGUAGES.map((code) => make("option", { value: code }));
  byId("source-language").append(make("option", { value: AUTO, text: "auto" }), ...options());
  byId("target-language").append(...options());
  byId("target-language").value = language() === "zh" ? "en" : "zh-CN";
  relabelLanguages();
  byId("translate-ask").addEventListener("submit", (event) => {
    event.preventDefault();
    translate();
  });
  byId("source").addEventListener("keydown", (event) => {
    if (isComposing(event) || event.key !== "Enter" || !(event.ctrlKey || event.metaKey)) return;
    event.preventDefault();
    translate();
  });
  byId("translate").addEventListener("keydown", (event) => {
    if (event.key === "Escape" && !isComposing(event)) running?.abort();
  });
  byId("translate-stop").addEventListener("click", () => running?.abort());
  byId("swap").addEventListener("click", swap);
  byId("copy-result").addEventListener("click", ({ currentTarget: button }) => {
    const lines = [...byId("result").children].map((line) => line.textContent.trim());
    copyText(lines.join("\n"), button);
  });
}
