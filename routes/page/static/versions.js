/** The turns of the open session and of its branches, as the server has them. */

import { versionsOf } from "./branches.js";
import { turnOf } from "./history.js";
import { familyOf, turnsOf } from "./sessions.js";

const MOST = 24; // branches that are looked at, those used last

/** @type {Map<string, import("./history.js").Turn[]>} */
const known = new Map();

/** Another session is opened. */
export function forgetTurns() {
  known.clear();
}

/** The turns of a session as far as they are known here. */
export function knownTurns(id) {
  return known.get(id);
}

/** Ask for all turns of a session. */
export async function readTurns(id) {
  const found = (await turnsOf(id)).map(turnOf);
  known.set(id, found);
  return found;
}

/** Ask for the turn that has just come behind those that are known. @param {number} number of it */
export async function readNewTurn(id, number) {
  const before = (known.get(id) ?? []).slice(0, number - 1);
  const found = (await turnsOf(id, before.length)).map(turnOf);
  known.set(id, [...before, ...found]);
  return known.get(id)[number - 1];
}

/** Ask for those of a session's family. */
export async function relatives(id) {
  const others = familyOf(id).filter((each) => each !== id);
  if (!others.length) return;
  const missing = [id, ...others.slice(0, MOST)].filter((each) => !known.has(each));
  await Promise.allSettled(missing.map(readTurns));
  for (const each of known.keys()) if (each !== id && !others.includes(each)) known.delete(each);
}

/** The versions of a turn of a session. @returns {import("./branches.js").Version[]} */
export function versionsIn(id, index) {
  return known.has(id) && known.get(id).length > index ? versionsOf(id, index, known) : [];
}
