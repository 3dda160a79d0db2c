/** What screen readers are told, and what is shown for a moment. */

import { byId, make } from "./dom.js";

const SHOWN = 4000; // milliseconds

/** Tell screen readers, politely. */
export function announce(words) {
  byId("announcer").textContent = words;
}

/** Show a message for a moment; screen readers are told too. */
export function notify(words, kind = "note") {
  announce(words);
  const toast = make("div", { class: `toast ${kind}`, content: words });
  byId("toasts").replaceChildren(toast);
  setTimeout(() => toast.remove(), SHOWN);
}
