/** The choice of a model, which all views share, and what belongs to each: adapters and start states. */

import { json } from "./api.js";
import { byId, make } from "./dom.js";

const KEY = "model";

/** @typedef {{id: string, adapters: string[], states: string[]}} Served */
/** @type {Served[]} */
let served = [];

/** Tells of "change", and of "loaded" when it is known what is served. */
export const models = new EventTarget();

/** The name of the chosen model; empty until the server has said what it serves. */
export function chosenModel() {
  return byId("model").value;
}

/** The chosen model, or one without anything. @returns {Served} */
export function chosen() {
  return served.find(({ id }) => id === chosenModel()) ?? { id: "", adapters: [], states: [] };
}

/** The list of the server as models: an adapter is named `model:adapter` there, a start state `model state`. */
function grouped(data) {
  const found = [];
  for (const { id, parent } of data) {
    const model = found.findLast((each) => parent === each.id || id.startsWith(`${each.id} `));
    if (!model) found.push({ id, adapters: [], states: [] });
    else if (parent) model.adapters.push(id.slice(parent.length + 1));
    else model.states.push(id.slice(model.id.length + 1));
  }
  return found;
}

/** Ask what is served. */
export async function loadModels() {
  const { data } = await json("v1/models");
  served = grouped(data);
  const select = byId("model");
  const before = select.value; // empty at first
  const wanted = before || localStorage.getItem(KEY);
  select.replaceChildren(...served.map(({ id }) => make("option", { value: id, content: id })));
  if (served.some(({ id }) => id === wanted)) select.value = wanted;
  select.disabled = served.length < 2;
  models.dispatchEvent(new Event("loaded"));
  if (before && select.value !== before) models.dispatchEvent(new Event("change"));
}

export function startModels() {
  byId("model").addEventListener("change", () => {
    localStorage.setItem(KEY, chosenModel());
    models.dispatchEvent(new Event("change"));
  });
}
