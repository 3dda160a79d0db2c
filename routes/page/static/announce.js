/** Messages for screen readers, and those that are shown for a moment. */

import { byId, make } from "./dom.js";

const SHOWN = 4000; // milliseconds

/** Tell screen readers, politely. */
export function announce(words) {
  byId("announcer").textContent = words;
}

/** Show a message for a moment, to screen readers too. */
export function notify(words, kind = "note") {
  announce(words);
  const toast = make("div", { class: `toast ${kind}`, content: words });
  byId("toasts").replaceChildren(toast);
  setTimeout(() => toast.remove(), SHOWN);
}
