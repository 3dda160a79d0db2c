/** The chat: one conversation, whose state the server keeps as a session. */

import { stream, TextRequest } from "./api.js";
import { announce } from "./announce.js";
import { copyCodeOf } from "./code.js";
import { connection, isLost } from "./connection.js";
import { byId, isComposing, showOneOf, valueOf } from "./dom.js";
import { nameOf, turnOf } from "./history.js";
import { chosenModel } from "./models.js";
import {
  deleteSession,
  exportSession,
  forkSession,
  leaveSession,
  loadSessions,
  markOpen,
  reported,
  rewindSession,
  sessions,
  turnsOf,
  unusedName,
} from "./sessions.js";
import { storedTurn, TurnView } from "./turns.js";
import { say, text } from "./texts.js";

const DRAFT = "draft"; // where an unsent message outlives a reload
const NEAR = 80; // pixels from the end within which the end is followed

let session = null; // the id of the one that is shown; null: a new one
let turns = 0; // how many the server has of it; NaN: it does not know
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
  list().replaceChildren();
  problem("");
  title();
  if (id === null) return box().focus();
  let found;
  try {
    found = (await turnsOf(id)).map(turnOf);
  } catch (error) {
    if (mine !== shown) return;
    outdated = error.status === 0;
    if (error.status === 409) turns = NaN; // there are some, which the server does not store: none has a number
    problem(error.message);
    return;
  }
  if (mine !== shown) return;
  turns = found.length;
  list().replaceChildren(...found.map((turn) => storedTurn(turn, actions).element));
  title();
  toEnd();
}

/** The heading, and what fits the number of turns. */
function title() {
  const heading = byId("chat-title");
  if (session === null) say(heading, "newChat");
  else {
    delete heading.dataset.text;
    heading.textContent = session;
  }
  byId("session-actions").hidden = session === null;
  byId("hello").hidden = session !== null || list().childElementCount > 0;
}

const actions = {
  rewind: (view) =>
    reported(async () => {
      const turns = view.number - 1; // that stay
      if (running || turns < 0 || !(await rewindSession(session, turns))) return;
      const message = view.user;
      if (turns) {
        await openSession(session);
        await loadSessions();
      } else await leaveSession(); // none is left of it
      announce(text("rewound"));
      if (!box().value) setMessage(message);
      box().focus();
    }),
  fork: (view) => reported(() => (view.number ? forkSession(session, view.number) : undefined)),
};

/** Send what the box holds, once the turns before it are shown. */
async function send() {
  await opening;
  const message = box().value.trim();
  if (!message || running || isLost()) return;
  const view = new TurnView({ asked: messagesFor(message) }, actions, followEnd);
  const request = (running = new TextRequest());
  const mine = shown;
  problem("");
  busy(true);
  view.begin();
  list().append(view.element);
  byId("hello").hidden = true;
  following = true;
  toEnd();
  let taken = false;
  const accepted = () => {
    taken = true;
    setMessage("");
  };
  try {
    const name = session ?? (await unusedName(nameOf(message)));
    if (mine === shown) session = name;
    const body = requestOf(message, name);
    let last = {};
    let tokens = 0;
    announce(text("answering"));
    const options = { body, ...request.options, accepted };
    for await (const event of stream("openai/v1/chat/completions", options)) {
      tokens = event.usage?.completion_tokens ?? tokens;
      for (const choice of event.choices) {
        if (choice.delta.reasoning_content) view.think(choice.delta.reasoning_content);
        if (choice.delta.content) view.write(choice.delta.content);
        if (choice.finish_reason) last = choice;
      }
    }
    if (mine === shown) {
      turns += 1;
      view.finish({ number: turns, tokens, note: noteOf(last.finish_reason) });
      announce(text("answered", { text: view.answer }));
      history.replaceState(null, "", `#chat/${encodeURIComponent(session)}`);
    }
  } catch (error) {
    failed(view, error, taken, message, mine === shown);
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
  if (mine === shown) markOpen(session);
}

/** Why an answer ended, as the key of a text. */
function noteOf(reason) {
  if (running?.stopping) return "stopped";
  return reason === "length" ? "cut" : "";
}

/** A request without a full answer. An unsent or lost message goes back into the box. */
function failed(view, error, taken, message, visible) {
  if (!visible) return;
  if (turns === 0) session = null;
  if (taken) view.fail(error.name === "AbortError" ? "stopped" : "broken");
  else view.element.remove();
  if (error.name !== "AbortError") problem(error.message);
  if (!box().value) setMessage(message);
  outdated ||= error.status === 0;
}

/** What is sent: the message, and at the beginning of a chat the system prompt before it. */
function messagesFor(message) {
  const system = byId("system").value.trim();
  const messages = [{ role: "user", content: message }];
  return system && turns === 0 ? [{ role: "system", content: system }, ...messages] : messages;
}

function requestOf(message, name) {
  return {
    model: chosenModel(),
    session_id: name,
    messages: messagesFor(message),
    stream: true,
    stream_options: { include_usage: true },
    temperature: valueOf("temperature"),
    top_p: valueOf("top-p"),
    max_tokens: valueOf("max-tokens"),
    enable_think: byId("think").getAttribute("aria-pressed") === "true",
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
  const message = box().value;
  const before = turns;
  await openSession(session);
  const lastAsked = list().lastElementChild?.querySelector(".asked p")?.textContent;
  if (turns > before && lastAsked === message) setMessage("");
}

function pressed(event) {
  if (isComposing(event)) return; // Enter chooses a word of an input method
  if (event.key === "Enter" && !event.shiftKey) {
    event.preventDefault();
    send();
  }
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
  byId("think").addEventListener("click", ({ currentTarget: button }) => {
    button.setAttribute("aria-pressed", String(button.getAttribute("aria-pressed") !== "true"));
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
  byId("fork").addEventListener("click", () => reported(() => forkSession(session)));
  byId("export").addEventListener("click", () => reported(() => exportSession(session)));
  byId("delete").addEventListener("click", () => reported(() => deleteSession(session)));
  connection.addEventListener("back", () => reported(resume));
  sessions.addEventListener("open", () => box().focus());
  box().value = sessionStorage.getItem(DRAFT) ?? "";
}
