/** Questions in a dialog: whether to go on, and with which name. */

import { byId } from "./dom.js";
import { say } from "./texts.js";

/**
 * Ask whether to go on.
 * @param {object} question its texts are keys of the table
 * @param {string} question.title
 * @param {string} question.note
 * @param {Record<string, string>} [question.values] of the note
 * @param {string} question.yes what the button says
 * @param {string} [question.name] what the field holds at first; without it there is none
 * @param {string} [question.label] of the field
 * @param {boolean} [question.grave] whether it cannot be undone
 * @param {(name: string) => Promise<any>} question.act what follows; its error is shown in the dialog
 * @returns {Promise<boolean>} whether it was done
 */
export function ask({ title, note, values = {}, yes, name, label = "name", grave = false, act }) {
  const dialog = byId("question");
  const field = byId("question-name");
  const button = byId("question-yes");
  const problem = byId("question-problem");
  say(byId("question-title"), title);
  say(byId("question-note"), note, values);
  say(byId("question-label"), label);
  say(button, yes);
  button.classList.toggle("grave", grave);
  byId("question-field").hidden = name === undefined;
  field.required = name !== undefined;
  field.value = name ?? "";
  problem.textContent = "";
  return new Promise((resolve) => {
    const settled = new AbortController();
    const { signal } = settled;
    let done = false;
    byId("question-form").addEventListener(
      "submit",
      async (event) => {
        event.preventDefault();
        button.disabled = true;
        try {
          await act(field.value.trim());
          done = true;
          dialog.close();
        } catch (error) {
          problem.textContent = error.message;
        } finally {
          button.disabled = false;
        }
      },
      { signal },
    );
    byId("question-no").addEventListener("click", () => dialog.close(), { signal });
    dialog.addEventListener(
      "close",
      () => {
        settled.abort();
        resolve(done);
      },
      { signal },
    );
    dialog.showModal();
    if (name !== undefined) field.select();
  });
}
