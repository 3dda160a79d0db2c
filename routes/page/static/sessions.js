/** The stored sessions: the list, and what can be done with one of them. */

import { call, json } from "./api.js";
import { notify } from "./announce.js";
import { branchNames, noBranch, stemOf } from "./branches.js";
import { ask } from "./dialogs.js";
import { byId, make } from "./dom.js";
import { freeName } from "./history.js";
import { chosenModel } from "./models.js";
import { disown, own, ownSessions } from "./own.js";
import { language, number, text } from "./texts.js";
import { download } from "./transcript.js";

const PAGE = 500; // sessions asked for at once
const OF_RESPONSES = "response:"; // these are continued by the Responses API only
const UNITS = [
  ["day", 86400],
  ["hour", 3600],
  ["minute", 60],
];

/** @type {{session_id: string, timestamp: number, tokens: number}[]} */
let listed = [];
let total = 0;
let last = null; // the id behind which the next page begins
let pages = Promise.resolve(); // that have been asked for
let open = null; // the id of the session that is shown

/** Tells of "open", with the id of a session, or null for a new one, as its detail. */
export const sessions = new EventTarget();

const isTaken = (name) => listed.some((each) => each.session_id === name);
const isKnown = (name) => isTaken(name) || name in ownSessions();

/** What a session is called: a branch has the name of the session that it is one of. */
export const titleOf = (id) => stemOf(id, isKnown);

/** The sessions that are branches of the same one, itself among them, those used last first. */
export function familyOf(id) {
  const stem = titleOf(id);
  const found = listed.filter((each) => titleOf(each.session_id) === stem);
  return found.sort((a, b) => b.timestamp - a.timestamp).map((each) => each.session_id);
}

const chooseSession = (id) => sessions.dispatchEvent(new CustomEvent("open", { detail: id }));

/** Ask for the list again. What is listed stays until then. */
export const loadSessions = () => loadPage(true);

/** One page after another: where the next one begins is known when those before it have come. */
function loadPage(first) {
  pages = pages.catch(() => {}).then(() => readPage(first));
  return pages;
}

async function readPage(first) {
  const after = first || last === null ? {} : { after: last };
  const page = await json("state/status", { body: { limit: PAGE, model: chosenModel(), ...after } });
  if (first) listed = [];
  const known = new Set(listed.map((each) => each.session_id));
  listed.push(...page.sessions.filter(({ session_id: id }) => !known.has(id)));
  total = page.total_sessions;
  last = page.sessions.at(-1)?.session_id ?? last;
  if (listed.length >= total) disown(Object.keys(ownSessions()).filter((id) => !isTaken(id)));
  render();
}

/** Show which session is open; null: a new one. */
export function markOpen(id) {
  open = id;
  for (const link of byId("session-list").querySelectorAll("a")) {
    if (id !== null && link.dataset.session === titleOf(id)) link.setAttribute("aria-current", "true");
    else link.removeAttribute("aria-current");
  }
}

function render() {
  const wanted = byId("session-filter").value.trim().toLowerCase();
  const shown = listed
    .filter(({ session_id: id }) => !id.startsWith(OF_RESPONSES) && id.toLowerCase().includes(wanted))
    .sort((a, b) => b.timestamp - a.timestamp);
  const mine = ownSessions();
  const stems = new Set();
  const [own_, others] = [[], []];
  for (const session of shown) {
    const stem = titleOf(session.session_id);
    if (stems.has(stem)) continue; // another branch was used later
    stems.add(stem);
    (stem in mine ? own_ : others).push(entry(session, stem));
  }
  byId("own-sessions").replaceChildren(...own_);
  byId("other-sessions").replaceChildren(...others);
  byId("others").hidden = !others.length;
  byId("others-title").hidden = !own_.length; // else there is nothing to tell them from
  byId("no-sessions").hidden = shown.length > 0 || wanted !== "";
  byId("none-found").hidden = shown.length > 0 || wanted === "";
  byId("more-sessions").hidden = listed.length >= total;
  byId("session-filter").hidden = listed.length < 6 && wanted === "";
  markOpen(open);
}

function entry({ session_id: id, timestamp, tokens }, stem) {
  const name = make("span", { class: "name", content: stem });
  const facts = `${text("tokensOf", { count: number(tokens) })} · ${ago(timestamp)}`;
  const href = `#chat/${encodeURIComponent(id)}`;
  const small = make("small", { content: facts });
  const link = make("a", { href, "data-session": stem, title: stem }, name, small);
  return make("li", {}, link);
}

/** How long ago a time is, in words. @param {number} timestamp seconds */
function ago(timestamp) {
  const seconds = Math.max(Date.now() / 1000 - timestamp, 0);
  const [unit, length] = UNITS.find(([, size]) => seconds >= size) ?? ["minute", 60];
  const words = new Intl.RelativeTimeFormat(language(), { numeric: "auto", style: "narrow" });
  return words.format(-Math.floor(seconds / length), unit);
}

/** A name that no session has. The list that is here may be one page of several. */
export async function unusedName(wanted) {
  const name = noBranch(wanted);
  for (let free = freeName(name, isTaken), count = 2; ; count += 1) {
    if (!(await isStored(free))) return free;
    free = `${name} (${count})`;
  }
}

async function isStored(name) {
  const body = { limit: 1, after: before(name), model: chosenModel() };
  const { sessions: found } = await json("state/status", { body });
  return found[0]?.session_id === name;
}

/** A text that stands before `name` in the order of code points, with nothing that is likely between. */
function before(name) {
  const characters = [...name];
  const code = characters.pop().codePointAt(0) - 1;
  const last = code >= 0xd800 && code < 0xe000 ? 0xd7ff : code; // surrogates are no characters
  return `${characters.join("")}${String.fromCodePoint(last)}\u{10fffd}`;
}

const parameters = (id) => new URLSearchParams({ session_id: id, model: chosenModel() });

/** All turns of a session, or those behind the first `before`. */
export async function turnsOf(id, before = 0) {
  const turns = [];
  for (;;) {
    const after = before + turns.length;
    const page = await json(`v1/state/history?limit=100&after=${after}&${parameters(id)}`);
    turns.push(...page.turns);
    if (page.turns.length < 100) return turns;
  }
}

/**
 * A name for another version of a session's later turns, with a copy of its first `turns` turns.
 * @param {string} id
 * @param {number} turns
 */
export async function branchOff(id, turns) {
  for (const name of branchNames(titleOf(id))) {
    if (isTaken(name) || (!turns && (await isStored(name)))) continue;
    try {
      if (turns) await forkTo(id, name, turns);
    } catch (error) {
      if (error.status === 409 && (await isStored(name))) continue; // it was not on the page that is here
      throw error;
    }
    own(name, ownSessions()[id]);
    return name;
  }
}

/** Forget a branch in which nothing was said. */
export async function dropBranch(name) {
  if (await isStored(name)) await remove(name);
  disown([name]);
}

const forkTo = (id, name, turn) =>
  json("v1/state/fork", { body: { session_id: id, new_session_id: name, turn, model: chosenModel() } });

const remove = (id) => json("state/delete", { body: { session_id: id, model: chosenModel() } });

/** Ask for a name, and give it to a session with all its branches. @returns {Promise<string | null>} the new id */
export async function renameSession(id) {
  const stem = titleOf(id);
  let made = null;
  const act = async (wanted) => {
    const name = noBranch(wanted);
    if (name === stem) return;
    const moves = familyOf(id).map((each) => [each, name + each.slice(stem.length)]);
    for (const [from, to] of moves) await forkTo(from, to);
    for (const [from, to] of moves) {
      own(to, ownSessions()[from]);
      await remove(from);
    }
    disown(moves.map(([from]) => from));
    made = name + id.slice(stem.length);
  };
  await ask({ title: "renameTitle", note: "renameText", yes: "rename", label: "name", name: stem, act });
  if (made !== null) await loadSessions();
  return made;
}

/** Ask for a name, copy the session up to a turn, and open the copy. */
export async function forkSession(id, turn) {
  let copy = "";
  const act = async (name) => {
    await forkTo(id, name, turn);
    own(name, ownSessions()[id]);
    copy = name;
  };
  const name = freeName(`${titleOf(id)} (2)`, isTaken);
  const question = { title: "forkTitle", note: "forkText", yes: "fork", label: "forkName", name, act };
  if (!(await ask(question))) return;
  await loadSessions();
  chooseSession(copy);
  notify(text("forked", { name: copy }));
}

/** Ask, then keep the first `turns` turns only. @returns {Promise<boolean>} whether it was done */
export function rewindSession(id, turns) {
  const act = () => json("v1/state/rewind", { body: { session_id: id, turn: turns, model: chosenModel() } });
  return ask({ title: "rewindTitle", note: "rewindText", yes: "rewind", act });
}

/** Ask, then delete a session with all its branches. */
export async function deleteSession(id) {
  const act = async () => {
    const ids = familyOf(id);
    for (const each of ids.length ? ids : [id]) await remove(each);
  };
  const values = { name: titleOf(id) };
  if (!(await ask({ title: "deleteTitle", note: "deleteText", values, yes: "remove", grave: true, act })))
    return;
  await leaveSession();
  notify(text("deleted"));
}

/** The open session is gone: show a new one. */
export async function leaveSession() {
  await loadSessions();
  chooseSession(null);
}

/** Give a session as a file. */
export async function exportSession(id) {
  const response = await call(`v1/state/export?${parameters(id)}`);
  download(await response.blob(), `${titleOf(id)}.rwkvstate`, "application/octet-stream");
}

async function importSession(file) {
  let made = "";
  const act = async (name) => {
    await json(`v1/state/import?${parameters(name)}`, { body: file });
    own(name);
    made = name;
  };
  const name = freeName(file.name.replace(/\.rwkvstate$/, ""), isTaken);
  const question = {
    title: "importTitle",
    note: "importText",
    yes: "import",
    label: "importName",
    name,
    act,
  };
  if (!(await ask(question))) return;
  await loadSessions();
  chooseSession(made);
  notify(text("imported", { name: made }));
}

/** Show an error as a message for a moment. */
export async function reported(action) {
  try {
    return await action();
  } catch (error) {
    notify(error.message, "error");
  }
}

export function startSessions() {
  byId("session-filter").addEventListener("input", render);
  byId("more-sessions").addEventListener("click", () => reported(() => loadPage(false)));
  byId("new-chat").addEventListener("click", () => chooseSession(null));
  const file = byId("import-file");
  byId("import").addEventListener("click", () => file.click());
  file.addEventListener("change", () => {
    const [chosen] = file.files;
    file.value = "";
    if (chosen) reported(() => importSession(chosen));
  });
}

/** Show the times and numbers of the list in the language of now. */
export function relabelSessions() {
  render();
}
