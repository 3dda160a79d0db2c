/** The choice of a model, which all views share. */

import { json } from "./api.js";
import { byId, make } from "./dom.js";

const KEY = "model";

/** Tells of "change". */
export const models = new EventTarget();

/** The name of the chosen model; empty until the server has said what it serves. */
export function chosenModel() {
  return byId("model").value;
}

/** Ask what is served: models, and each with its adapters and start states. */
export async function loadModels() {
  const { data } = await json("v1/models");
  const select = byId("model");
  const before = select.value; // empty at first
  const wanted = before || localStorage.getItem(KEY);
  select.replaceChildren(...data.map(({ id }) => make("option", { value: id, content: id })));
  if (data.some(({ id }) => id === wanted)) select.value = wanted;
  select.disabled = data.length < 2;
  if (before && select.value !== before) models.dispatchEvent(new Event("change"));
}

export function startModels() {
  byId("model").addEventListener("change", () => {
    localStorage.setItem(KEY, chosenModel());
    models.dispatchEvent(new Event("change"));
  });
}
