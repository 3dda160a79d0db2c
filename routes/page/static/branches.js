/**
 * Versions of turns.
 *
 * A fork costs nothing, so another answer is asked for in a copy of the session up to there: "name ~2" beside
 * "name". Turns that sessions have in common are the same turns on the server, so the histories of a family
 * say which turns are versions of which.
 */

/** @typedef {import("./history.js").Turn} Turn */
/** @typedef {{id: string, key: string, created: number}} Version a turn, and a session that holds it */

const BRANCH = /^(.+) ~\d+$/;

/**
 * The session that a session is a branch of, or itself.
 * @param {string} id
 * @param {(id: string) => boolean} isThere
 */
export function stemOf(id, isThere) {
  const stem = BRANCH.exec(id)?.[1];
  return stem !== undefined && isThere(stem) ? stem : id;
}

/** The name without what would make it one of a branch. */
export function noBranch(name) {
  return BRANCH.test(name) ? name.replace(/ ~(\d+)$/, " $1") : name;
}

/** Names for the next branch of a session. @param {string} stem @returns {Generator<string>} */
export function* branchNames(stem) {
  for (let count = 2; ; count += 1) yield `${stem} ~${count}`;
}

/**
 * The versions of a session's turn, oldest first.
 * @param {string} id
 * @param {number} index of the turn
 * @param {Map<string, Turn[]>} family the turns of the session and of its relatives
 * @returns {Version[]} that of the session itself under its own id
 */
export function versionsOf(id, index, family) {
  const turns = family.get(id);
  /** @type {Map<string, Version & {last: number}>} */
  const found = new Map();
  for (const [other, theirs] of family) {
    if (theirs.length <= index || !sameBefore(turns, theirs, index)) continue;
    const { key, created } = theirs[index];
    const last = other === id ? Infinity : theirs.at(-1).created;
    if (!found.has(key) || found.get(key).last < last) found.set(key, { id: other, key, created, last });
  }
  return [...found.values()].sort((a, b) => a.created - b.created);
}

function sameBefore(turns, theirs, index) {
  return turns.slice(0, index).every(({ key }, place) => theirs[place].key === key);
}
