/** The options of a chat. They stay in the browser, and an empty field shows what the server takes instead. */

import { json } from "./api.js";
import { byId, make, valueOf } from "./dom.js";
import { chosen, models } from "./models.js";
import { say } from "./texts.js";

const KEY = "options";
/** Field of a request -> id of the element. */
const NUMBERS = {
  temperature: "temperature",
  top_p: "top-p",
  top_k: "top-k",
  alpha_presence: "alpha-presence",
  alpha_frequency: "alpha-frequency",
  alpha_decay: "alpha-decay",
  max_tokens: "max-tokens",
  seed: "seed",
};
const FIELDS = [...Object.values(NUMBERS), "system", "stops", "start-state", "adapter"];

/** The system prompt of a new chat. */
export function systemPrompt() {
  return byId("system").value.trim();
}

/** With what a new chat begins, besides. @returns {{adapter: string, state: string}} empty where there is none */
export function beginning() {
  return { adapter: byId("adapter").value, state: byId("start-state").value };
}

/** The name of the model in a request. @param {{adapter?: string, state?: string}} with_ */
export function modelWith({ adapter = "", state = "" }) {
  return `${chosen().id}${adapter && `:${adapter}`}${state && ` ${state}`}`;
}

/** The fields of a request that say how an answer is drawn. */
export function drawing() {
  const stops = byId("stops").value.split("\n").filter(Boolean);
  return {
    ...Object.fromEntries(Object.entries(NUMBERS).map(([name, id]) => [name, valueOf(id)])),
    ...(stops.length ? { stop: stops.map((each) => each.replaceAll("\\n", "\n")) } : {}),
    enable_think: byId("think").getAttribute("aria-pressed") === "true",
  };
}

function keep() {
  const kept = Object.fromEntries(FIELDS.map((id) => [id, byId(id).value]).filter(([, value]) => value));
  if (byId("think").getAttribute("aria-pressed") === "true") kept.think = "true";
  if (Object.keys(kept).length) localStorage.setItem(KEY, JSON.stringify(kept));
  else localStorage.removeItem(KEY);
  mark();
}

function kept() {
  try {
    return JSON.parse(localStorage.getItem(KEY)) ?? {};
  } catch {
    return {};
  }
}

function restore() {
  const found = kept();
  for (const id of FIELDS) if (byId(id).tagName !== "SELECT") byId(id).value = found[id] ?? "";
  byId("think").setAttribute("aria-pressed", String(found.think === "true"));
  choices();
  mark();
}

/** Say on the button how many options differ from the defaults. */
function mark() {
  const count = FIELDS.filter((id) => byId(id).value).length;
  const button = byId("options-button");
  button.classList.toggle("changed", count > 0);
  say(byId("options-count"), count ? "changedOptions" : "options", { count });
  byId("options-reset").hidden = count === 0;
}

/** What the model has: start states and adapters, where there are some. */
function choices() {
  const { adapters, states } = chosen();
  const found = kept();
  for (const [id, names] of [["adapter", adapters], ["start-state", states]]) {
    const options = names.map((name) => make("option", { value: name, content: name }));
    byId(id).replaceChildren(make("option", { value: "", text: "none" }), ...options);
    byId(id).value = names.includes(found[id]) ? found[id] : "";
    byId(id).closest("label").hidden = !names.length;
  }
  mark();
}

/** Show the defaults in the empty fields. */
async function showDefaults() {
  let found;
  try {
    found = await json(`page/defaults.json?${new URLSearchParams({ model: modelWith(beginning()) })}`);
  } catch {
    return; // they are shown, and no more
  }
  for (const [name, id] of Object.entries(NUMBERS)) {
    if (found[name] === undefined) continue;
    delete byId(id).dataset.hint;
    byId(id).placeholder = String(Number(found[name].toPrecision(7)));
  }
  if (found.stop.length) byId("stops").placeholder = found.stop.join("\n").replaceAll("\n", "\\n");
}

export function startOptions() {
  restore();
  byId("options").addEventListener("input", keep);
  byId("options").addEventListener("toggle", ({ newState }) => {
    if (newState === "open") showDefaults();
  });
  for (const id of ["adapter", "start-state"]) byId(id).addEventListener("change", showDefaults);
  byId("think").addEventListener("click", ({ currentTarget: button }) => {
    button.setAttribute("aria-pressed", String(button.getAttribute("aria-pressed") !== "true"));
    keep();
  });
  byId("options-reset").addEventListener("click", () => {
    for (const id of FIELDS) byId(id).value = "";
    keep();
    byId("system").focus();
  });
  models.addEventListener("loaded", choices);
  models.addEventListener("change", choices);
}
