/**
 * The turns of a stored session as messages.
 *
 * The server keeps the texts that the model has read and written, so "User:" and the tags of a thought stand
 * in them. What other clients have stored may look otherwise, and is shown as it is.
 */

/**
 * @typedef {object} Message
 * @property {"system" | "user" | "assistant" | "tool"} role
 * @property {string} content
 */

/**
 * @typedef {object} Turn
 * @property {number} number
 * @property {string} key the same for what is one turn in several sessions, as forks share theirs
 * @property {Message[]} asked all messages of the turn before the answer, one of them if `raw`
 * @property {boolean} raw whether the prompt has no form that is known here
 * @property {string} thought
 * @property {string} answer
 * @property {number} tokens of the answer
 * @property {number} created seconds since 1970
 */

const PARTS = /\n\n(?=(?:System|User|Assistant|Tool):)/; // the server lets no message hold this
const PART = /^(System|User|Assistant|Tool): ?([^]*)$/;
const MOST_OF_NAME = 48; // characters
const THOUGHT = /^\s*<think(?:>(?<thought>[^]*?))?(?:<\/think>|$)(?<answer>[^]*)$/;

/**
 * @param {{turn: number, prompt: string, completion: string, created: number, start: number, end: number,
 *     completion_tokens: number[]}} stored
 * @returns {Turn}
 */
export function turnOf({ turn, prompt, completion, created, start, end, completion_tokens: drawn }) {
  const messages = messagesOf(prompt.replace(/^\n+/, ""));
  const common = { number: turn, key: `${turn} ${start} ${end} ${created}`, created, tokens: drawn.length };
  if (messages?.at(-1).role !== "assistant" || messages.length < 2) {
    const asked = [{ role: "user", content: prompt }];
    return { ...common, asked, raw: true, thought: "", answer: completion };
  }
  const opening = messages.pop().content;
  const asked = messages.map(({ role, content }) =>
    role === "assistant" ? { role, content: answerOf(content).answer } : { role, content },
  );
  return { ...common, asked, raw: false, ...answerOf(opening + completion) };
}

/** The messages that a prompt is made of, or null if it has another form. @returns {Message[] | null} */
function messagesOf(prompt) {
  const parts = prompt.split(PARTS).map((part) => PART.exec(part));
  if (!parts.every(Boolean)) return null;
  return parts.map(([, role, content]) => ({ role: role.toLowerCase(), content }));
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
  const characters = [...line];
  const words = characters.slice(0, MOST_OF_NAME).join("");
  const end = words.lastIndexOf(" ") > MOST_OF_NAME / 2 ? words.lastIndexOf(" ") : words.length;
  const short = characters.length > MOST_OF_NAME ? `${words.slice(0, end).trim()}…` : words;
  return short.startsWith("response:") ? `“${short}”` : short;
}

/** `name`, or with the first number behind it that is not taken. @param {(name: string) => boolean} taken */
export function freeName(name, taken) {
  const stem = name.replace(/ \(\d+\)$/, "");
  let free = name;
  for (let count = 2; taken(free); count += 1) free = `${stem} (${count})`;
  return free;
}
