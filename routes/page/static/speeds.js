/** How fast answers came, until the tab is closed: the server stores no times of turns. */

const KEY = "speeds";
const MOST = 400; // that are kept

/** @returns {Record<string, number>} tokens a second, by the key of the turn */
function all() {
  try {
    return JSON.parse(sessionStorage.getItem(KEY)) ?? {};
  } catch {
    return {};
  }
}

/** Keep the speed of a turn. @param {import("./history.js").Turn} turn @param {number} speed tokens a second */
export function keepSpeed(turn, speed) {
  const kept = Object.entries({ ...all(), [turn.key]: Math.round(speed * 10) / 10 });
  sessionStorage.setItem(KEY, JSON.stringify(Object.fromEntries(kept.slice(-MOST))));
}

/** The speed of a turn, or 0. */
export function speedOf(turn) {
  return all()[turn.key] ?? 0;
}
