/** Which sessions this browser has begun, and with what; others on the server are those of other clients. */

import { chosenModel } from "./models.js";

const KEY = "sessions";

/** @typedef {{adapter?: string, state?: string}} Beginning */

let written = null; // what is stored, also by another tab,
let read = {}; // and what that means

/** @returns {Record<string, Record<string, Beginning>>} by model and session */
function all() {
  const now = localStorage.getItem(KEY);
  if (now === written) return read;
  written = now;
  try {
    read = JSON.parse(now) ?? {};
  } catch {
    read = {};
  }
  return read;
}

function change(by) {
  const kept = all();
  const mine = kept[chosenModel()] ?? {};
  by(mine);
  kept[chosenModel()] = mine;
  for (const model of Object.keys(kept)) if (!Object.keys(kept[model]).length) delete kept[model];
  if (Object.keys(kept).length) localStorage.setItem(KEY, JSON.stringify(kept));
  else localStorage.removeItem(KEY);
}

/** The sessions of the chosen model that are this browser's. @returns {Record<string, Beginning>} */
export function ownSessions() {
  return all()[chosenModel()] ?? {};
}

/** A session is this browser's from now on. @param {string} id @param {Beginning} [beginning] */
export function own(id, beginning = {}) {
  const given = Object.fromEntries(Object.entries(beginning).filter(([, value]) => value));
  change((mine) => (mine[id] = given));
}

/** Sessions are gone, or are none of this browser's. @param {string[]} ids */
export function disown(ids) {
  if (ids.length) change((mine) => ids.forEach((id) => delete mine[id]));
}
