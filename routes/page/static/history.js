/**
 * The turns of a stored session as messages.
 *
 * The server keeps the texts that the model has read and written, so "User:" and the tags of a thought stand
 * in them. What other clients have stored may look otherwise, and is shown as it is.
 */

/**
 * @typedef {object} Turn
 * @property {number} number
 * @property {string} system of its first message, or empty
 * @property {string} user what was asked; the whole prompt if `raw`
 * @property {boolean} raw whether the prompt has no form that is known here
 * @property {string} thought
 * @property {string} answer
 * @property {boolean} unknown whether the server keeps no text
 */

const PROMPT = /^(?:System: (?<system>[^]*?)\n\n)?User: (?<user>[^]*?)\n\nAssistant:(?<opening>[^]*)$/;
const THOUGHT = /^\s*<think(?:>(?<thought>[^]*?))?(?:<\/think>|$)(?<answer>[^]*)$/;

/**
 * @param {{turn: number, prompt: string | null, completion: string | null}} stored
 * @returns {Turn}
 */
export function turnOf({ turn, prompt, completion }) {
  const known = PROMPT.exec((prompt ?? "").replace(/^\n+/, ""));
  const unknown = prompt === null || completion === null;
  if (!known) {
    return {
      number: turn,
      system: "",
      user: prompt ?? "",
      raw: true,
      thought: "",
      answer: completion ?? "",
      unknown,
    };
  }
  const { system = "", user, opening } = known.groups;
  return { number: turn, system, user, raw: false, ...answerOf(opening + completion), unknown };
}

/** The thought and the answer of what stands behind "Assistant:". */
function answerOf(written) {
  const found = THOUGHT.exec(written);
  if (!found) return { thought: "", answer: written.trim() };
  return { thought: (found.groups.thought ?? "").trim(), answer: found.groups.answer.trim() };
}

/** A name for a new session, made of its first message. */
export function nameOf(message) {
  const line = message.replace(/[\u0000-\u001f\u007f-\u009f\s]+/g, " ").trim();
  const short = [...line].slice(0, 48).join("").trim();
  return short.startsWith("response:") ? `“${short}”` : short;
}

/** `name`, or with the first number behind it that is not taken. @param {(name: string) => boolean} taken */
export function freeName(name, taken) {
  const stem = name.replace(/ \(\d+\)$/, "");
  let free = name;
  for (let count = 2; taken(free); count += 1) free = `${stem} (${count})`;
  return free;
}
