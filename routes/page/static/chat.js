/** The chat: one conversation, whose state the server keeps as a session. */

import { stream, TextRequest } from "./api.js";
import { announce, notify } from "./announce.js";
import { attachments, setAttachments, startAttachments, subjectOf, withFiles } from "./attach.js";
import { copyCodeOf } from "./code.js";
import { connection, isLost } from "./connection.js";
import { byId, isComposing, showOneOf } from "./dom.js";
import { nameOf } from "./history.js";
import { beginning, drawing, modelWith, startOptions, systemPrompt } from "./options.js";
import { own, ownSessions } from "./own.js";
import {
  branchOff,
  deleteSession,
  dropBranch,
  exportSession,
  forkSession,
  leaveSession,
  loadSessions,
  markOpen,
  renameSession,
  reported,
  rewindSession,
  sessions,
  titleOf,
  unusedName,
} from "./sessions.js";
import { keepSpeed } from "./speeds.js";
import { say, text } from "./texts.js";
import { download, transcript } from "./transcript.js";
import { storedTurn, TurnView } from "./turns.js";
import { forgetTurns, knownTurns, readNewTurn, readTurns, relatives, versionsIn } from "./versions.js";

const DRAFT = "draft"; // where an unsent message outlives a reload
const NEAR = 80; // pixels from the end within which the end is followed

let session = null; // the id of the one that is shown; null: a new one
let turns = 0; // how many the server has of it; NaN: it does not know
/** @type {TurnView[]} those on the page */
let views = [];
/** @type {TextRequest | null} */
let running = null; // the answer on its way
let shown = 0; // counts what was opened, so that a late history is not shown
let opening = Promise.resolve(); // until the turns that the server has are shown
let outdated = false; // whether the connection broke since the history was read
let following = true;
let followed = 0; // where `toEnd` has scrolled to

const list = () => byId("turns");
const box = () => byId("message");

/** The id of the session that is shown; null: a new one. */
export function shownSession() {
  return session;
}

/** Show a session, or with null a new one. */
export function openSession(id) {
  return (opening = read(id));
}

async function read(id) {
  stop();
  const mine = (shown += 1);
  session = id;
  turns = 0;
  outdated = false;
  markOpen(id);
  forgetTurns();
  fill([]);
  problem("");
  title();
  if (id === null) return box().focus();
  let found;
  try {
    found = await readTurns(id);
  } catch (error) {
    if (mine !== shown) return;
    outdated = error.status === 0;
    if (error.status === 409) turns = NaN; // there are some, which the server does not store: none has a number
    problem(error.message);
    return;
  }
  if (mine !== shown) return;
  turns = found.length;
  fill(found);
  title();
  toEnd();
  showVersions(mine);
}

/** Put turns on the page in place of those that are there. @param {import("./history.js").Turn[]} found */
function fill(found) {
  views = found.map((turn) => storedTurn(turn, actions));
  list().replaceChildren(...views.map((view) => view.element));
}

/** Ask for the branches of the session, and show which turns have several versions. */
async function showVersions(mine) {
  const id = session;
  await relatives(id);
  if (mine !== shown || id !== session) return;
  views.forEach((view, index) => view.number && view.showVersions(versionsIn(id, index), id));
}

/** The heading, and what fits the number of turns. */
function title() {
  const heading = byId("chat-title");
  if (session === null) say(heading, "newChat");
  else {
    delete heading.dataset.text;
    heading.textContent = titleOf(session);
  }
  byId("session-actions").hidden = session === null;
  byId("hello").hidden = session !== null || views.length > 0;
}

const actions = {
  rewind: (view) =>
    reported(async () => {
      const left = view.number - 1; // turns that stay
      if (running || !(left >= 0) || !(await rewindSession(session, left))) return;
      const message = view.user;
      if (left) {
        await openSession(session);
        await loadSessions();
      } else await leaveSession(); // none is left of it
      announce(text("rewound"));
      if (!box().value) setMessage(message);
      box().focus();
    }),
  fork: (view) => reported(() => (view.number ? forkSession(session, view.number) : undefined)),
  again: (view, message) => reported(() => askAgain(view, message)),
  show: (view, id) => reported(() => showVersion(view, id)),
};

/** Show the session that holds another version of a turn, with that turn where the first one stands. */
async function showVersion(view, id) {
  if (running) return;
  const index = views.indexOf(view);
  const top = view.element.getBoundingClientRect().top;
  const found = knownTurns(id) ?? (await readTurns(id));
  const back = found[index].created < (knownTurns(session)?.[index]?.created ?? 0);
  shown += 1;
  session = id;
  turns = found.length;
  fill(found);
  title();
  markOpen(id);
  place();
  views.forEach((each, at) => each.showVersions(versionsIn(id, at), id));
  byId("conversation").scrollTop += views[index].element.getBoundingClientRect().top - top;
  views[index].focusVersions(back);
  const versions = versionsIn(id, index);
  const at = versions.findIndex((each) => each.id === id) + 1;
  announce(text("versionOf", { at, count: versions.length }));
}

/** Keep the address of what is shown. */
function place() {
  history.replaceState(null, "", `#chat/${encodeURIComponent(session)}`);
}

/** Ask once more, in a branch that has the turns before. @param {string} [message] in place of the last one */
async function askAgain(view, message = view.user) {
  if (running || !view.number || isLost()) return;
  const [before, left] = [session, view.number - 1];
  const last = view.asked.findLastIndex(({ role }) => role === "user");
  const asked = view.asked.map((each, at) => (at === last ? { ...each, content: message } : each));
  const mine = shown;
  const name = await branchOff(before, left);
  if (mine !== shown || running) return dropBranch(name);
  session = name;
  turns = left;
  for (const each of views.splice(left)) each.element.remove();
  const done = await exchange(asked, name);
  if (done || mine !== shown || isLost()) return;
  const said = byId("chat-problem").textContent;
  await dropBranch(name); // it holds nothing new
  await openSession(before);
  problem(said);
}

/** Send what the box holds, once the turns before it are shown. */
async function send() {
  await opening;
  const [words, files] = [box().value.trim(), attachments()];
  const message = withFiles(words, files);
  if (!message || running || isLost()) return;
  const system = turns === 0 ? systemPrompt() : "";
  const asked = [{ role: "user", content: message }];
  if (system) asked.unshift({ role: "system", content: system });
  const accepted = () => {
    setMessage("");
    setAttachments([]);
  };
  const refused = () => {
    if (turns === 0) session = null;
    if (!box().value) setMessage(words);
    if (!attachments().length) setAttachments(files);
  };
  await exchange(asked, session, { accepted, refused });
}

/**
 * Ask, and show the answer as it comes.
 * @param {import("./history.js").Message[]} asked
 * @param {string | null} to the session; null: a new one
 * @param {{accepted?: () => void, refused?: () => void}} [then]
 * @returns {Promise<boolean>} whether the session holds it now
 */
async function exchange(asked, to, { accepted = () => {}, refused = () => {} } = {}) {
  const view = new TurnView({ asked }, actions, followEnd);
  const request = (running = new TextRequest());
  const mine = shown;
  const with_ = (to && ownSessions()[to]) || (turns === 0 ? beginning() : {});
  let [taken, done] = [false, false];
  problem("");
  busy(true);
  view.begin();
  views.push(view);
  list().append(view.element);
  byId("hello").hidden = true;
  following = true;
  toEnd();
  try {
    const name = to ?? (await unusedName(nameOf(subjectOf(view.user))));
    if (mine === shown) session = name;
    const body = requestOf(asked, name, with_);
    const options = {
      body,
      ...request.options,
      accepted: () => {
        taken = true;
        own(name, with_);
        accepted();
      },
    };
    announce(text("answering"));
    const { reason, tokens } = await readAnswer(view, options);
    done = true;
    if (mine === shown) {
      turns += 1;
      view.finish({ number: turns, tokens, note: noteOf(reason) });
      announce(text("answered", { text: view.answer }));
      place();
    }
  } catch (error) {
    if (mine === shown) {
      failed(view, error, taken);
      refused();
    }
  } finally {
    request.ended();
    running = null;
    busy(false);
    if (mine === shown) {
      title();
      markOpen(session);
    }
  }
  if (!isLost()) await reported(loadSessions);
  if (mine === shown) {
    markOpen(session);
    title();
    if (done && !isLost()) finished(view, mine).catch(() => {}); // a server may keep no turns
  }
  return done;
}

/** A turn is stored: note how fast it came, and show which versions there are. */
async function finished(view, mine) {
  const turn = await readNewTurn(session, view.number);
  if (turn) keepSpeed(turn, view.speed);
  if (mine === shown) await showVersions(mine);
}

/** @returns {Promise<{reason: string, tokens: number}>} why it has ended, and its size */
async function readAnswer(view, options) {
  let [reason, tokens] = ["", 0];
  for await (const event of stream("openai/v1/chat/completions", options)) {
    tokens = event.usage?.completion_tokens ?? tokens;
    for (const choice of event.choices) {
      if (choice.delta.reasoning_content) view.think(choice.delta.reasoning_content);
      if (choice.delta.content) view.write(choice.delta.content);
      reason = choice.finish_reason ?? reason;
    }
  }
  return { reason, tokens };
}

/** Why an answer ended, as the key of a text. */
function noteOf(reason) {
  if (running?.stopping) return "stopped";
  return reason === "length" ? "cut" : "";
}

/** A request without a full answer. */
function failed(view, error, taken) {
  if (taken) view.fail(error.name === "AbortError" ? "stopped" : "broken");
  else {
    view.element.remove();
    views.splice(views.indexOf(view), 1);
  }
  if (error.name !== "AbortError") problem(error.message);
  outdated ||= error.status === 0;
}

function requestOf(messages, name, with_) {
  return {
    ...drawing(),
    model: modelWith(with_),
    session_id: name,
    messages,
    stream: true,
    stream_options: { include_usage: true },
  };
}

/** End the answer where it is; the session keeps what has come. */
function stop() {
  running?.stop();
}

function busy(is) {
  if (is) showOneOf(byId("stop"), byId("send"));
  else showOneOf(byId("send"), byId("stop"));
  box().readOnly = is; // until the server has taken the message
}

function setMessage(message) {
  box().value = message;
  box().readOnly = false;
  drafted();
}

function drafted() {
  if (box().value) sessionStorage.setItem(DRAFT, box().value);
  else sessionStorage.removeItem(DRAFT);
}

function problem(message) {
  byId("chat-problem").textContent = message;
  byId("chat-problem").hidden = !message;
}

function followEnd() {
  if (!following) return;
  const { scrollTop, scrollHeight, clientHeight } = byId("conversation");
  // Who has scrolled up since is let alone, though the event that says so is still to come.
  if (scrollTop >= Math.min(followed, scrollHeight - clientHeight) - NEAR) toEnd();
}

function toEnd() {
  const scroller = byId("conversation");
  scroller.scrollTop = scroller.scrollHeight;
  followed = scroller.scrollTop;
}

function watchEnd() {
  const { scrollTop, scrollHeight, clientHeight } = byId("conversation");
  following = scrollHeight - scrollTop - clientHeight < NEAR;
  byId("to-end").hidden = following;
}

/** Read the session again after the connection was lost. A turn that it holds is not sent again. */
async function resume() {
  problem("");
  if (!outdated) return;
  outdated = false;
  const message = withFiles(box().value, attachments());
  const before = turns;
  await openSession(session);
  if (turns <= before || views.at(-1)?.user !== message) return;
  setMessage("");
  setAttachments([]);
}

function pressed(event) {
  if (isComposing(event)) return; // Enter chooses a word of an input method
  if (event.key === "Enter" && !event.shiftKey) {
    event.preventDefault();
    send();
  }
}

/** What can be done with the session, in the menu of its title. */
function startMenu() {
  const on = (id, act) =>
    byId(id).addEventListener("click", () => {
      byId("session-menu").hidePopover();
      reported(act);
    });
  on("rename", async () => {
    const name = await renameSession(session);
    if (name === null) return;
    session = name;
    forgetTurns();
    place();
    title();
    markOpen(session);
    await showVersions(shown);
    notify(text("renamed", { name: titleOf(name) }));
  });
  on("fork", () => forkSession(session));
  on("save", async () => {
    const name = titleOf(session);
    download(transcript(name, await readTurns(session)), `${name}.md`, "text/markdown");
  });
  on("export", () => exportSession(session));
  on("delete", () => deleteSession(session));
}

export function startChat() {
  byId("composer").addEventListener("submit", (event) => {
    event.preventDefault();
    send();
  });
  box().addEventListener("keydown", pressed);
  box().addEventListener("input", drafted);
  byId("stop").addEventListener("click", stop);
  byId("chat").addEventListener("keydown", (event) => {
    if (event.key === "Escape" && !isComposing(event)) stop();
  });
  byId("conversation").addEventListener("scroll", watchEnd, { passive: true });
  byId("to-end").addEventListener("click", toEnd);
  copyCodeOf(list());
  byId("hello").addEventListener("click", ({ target }) => {
    const example = target.closest(".example");
    if (!example) return;
    setMessage(example.textContent);
    send();
  });
  startMenu();
  startOptions();
  startAttachments();
  connection.addEventListener("back", () => reported(resume));
  sessions.addEventListener("open", () => box().focus());
  box().value = sessionStorage.getItem(DRAFT) ?? "";
}
