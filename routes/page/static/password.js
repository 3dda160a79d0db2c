/** Passwords: asked for once, kept until the tab is closed, sent as a header only. */

import { byId } from "./dom.js";
import { say } from "./texts.js";

/** Tells of "given". */
export const passwords = new EventTarget();

/** @type {Map<string, Promise<void>>} the questions that are open, by kind */
const asking = new Map();

/** The password of a kind, "password" or "metrics-password", or null. */
export function password(kind) {
  return sessionStorage.getItem(kind);
}

/**
 * Ask for a password, once for all calls that wait for it. Rejects if nobody gives one.
 * @param {string} kind
 * @param {string | null} refused the one that was wrong
 */
export function askPassword(kind, refused) {
  if (password(kind) !== refused) return Promise.resolve(); // another call has asked meanwhile
  if (!asking.has(kind))
    asking.set(
      kind,
      ask(kind, refused).finally(() => asking.delete(kind)),
    );
  return asking.get(kind);
}

/** @returns {Promise<void>} */
function ask(kind, refused) {
  const dialog = byId("password-dialog");
  const field = byId("password");
  const problem = byId("password-problem");
  say(byId("password-title"), kind === "password" ? "passwordTitle" : "metricsTitle");
  if (refused === null) problem.textContent = "";
  else say(problem, "passwordWrong");
  field.value = "";
  return new Promise((resolve, reject) => {
    const settled = new AbortController();
    const { signal } = settled;
    byId("password-form").addEventListener(
      "submit",
      (event) => {
        event.preventDefault();
        if (!/^[ -~]+$/.test(field.value)) return say(problem, "passwordAscii");
        sessionStorage.setItem(kind, field.value);
        settled.abort();
        dialog.close();
        resolve();
        passwords.dispatchEvent(new Event("given"));
      },
      { signal },
    );
    dialog.addEventListener(
      "close",
      () => {
        if (dialog.open) return; // the event is that of the question before, and comes after this one
        settled.abort();
        reject(new Error("No password was given."));
      },
      { signal },
    );
    dialog.showModal();
    field.focus();
  });
}
