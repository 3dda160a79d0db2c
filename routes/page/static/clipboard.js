/** Copying. Browsers have `navigator.clipboard` on HTTPS and localhost only; elsewhere an older way works. */

import { announce, notify } from "./announce.js";
import { text } from "./texts.js";

const SHOWN = 1200; // milliseconds for which a button says that it has copied

/** Copy a text; `button` shows that it was done. @param {string} content @param {Element} [button] */
export async function copyText(content, button) {
  if (!((await written(content)) || selected(content))) return notify(text("notCopied"), "error");
  announce(text("copied"));
  if (!button) return;
  button.classList.add("done");
  setTimeout(() => button.classList.remove("done"), SHOWN);
}

async function written(content) {
  try {
    await navigator.clipboard.writeText(content);
    return true;
  } catch {
    return false; // there is none, or it is not allowed
  }
}

/** Copy by a field that is selected for a moment. A dialog lets nothing outside of it have the focus. */
function selected(content) {
  const focused = document.activeElement;
  const field = document.createElement("textarea");
  field.value = content;
  field.className = "unseen";
  (document.querySelector("dialog[open]") ?? document.body).append(field);
  field.select();
  const done = document.execCommand("copy");
  field.remove();
  focused?.focus({ preventScroll: true });
  return done;
}
