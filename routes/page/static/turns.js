/** How one turn of a conversation looks: what was asked, the thought folded, the answer, its versions. */

import { apart, withFiles } from "./attach.js";
import { copyText } from "./clipboard.js";
import { iconButton, isComposing, make, TextSink } from "./dom.js";
import { speedOf } from "./speeds.js";
import { MarkdownSink } from "./streamed.js";
import { number, say, text } from "./texts.js";

const LONG = 1200; // characters of a message that is folded
const TITLES = { user: "you", assistant: "assistant", system: "systemMessage", tool: "toolMessage" };

/**
 * @typedef {object} TurnActions
 * @property {(view: TurnView) => void} rewind
 * @property {(view: TurnView) => void} fork
 * @property {(view: TurnView, message?: string) => void} again ask once more, or something else
 * @property {(view: TurnView, id: string) => void} show the version that another session holds
 */

/** One turn in the document. */
export class TurnView {
  /**
   * @param {{asked: import("./history.js").Message[], raw?: boolean}} turn
   * @param {TurnActions} actions
   * @param {() => void} written is called when the answer has grown
   */
  constructor({ asked, raw = false }, actions, written) {
    this.asked = asked;
    this.user = asked.findLast(({ role }) => role === "user")?.content ?? "";
    this.number = 0; // its place in the session, once the server has it
    this.speed = 0; // tokens a second, once it is known
    this.thought = "";
    this._actions = actions;
    this._written = written;
    this._thoughts = null;
    this._began = 0;
    this._answer = make("div", { class: "text markdown" });
    this._reply = make("div", { class: "reply" }, this._answer);
    this._versions = make("div", { class: "versions", role: "group", label: "versions", hidden: true });
    this._foot = make("p", { class: "foot" });
    const under = make("div", { class: "under" }, this._versions, this._foot, this._buttons(raw));
    this.element = make(
      "article",
      { class: "turn" },
      ...asked.flatMap((message) => shown(message, raw)),
      make("h3", { class: "unseen", text: "assistant" }),
      make("div", { class: "assistant" }, this._reply, under),
    );
    this._asked = [...this.element.querySelectorAll(".user")].at(-1);
    this._asked?.prepend(this._buttonsOfUser(raw));
    this._sink = new MarkdownSink(this._answer, written);
  }

  get answer() {
    return this._sink.text;
  }

  _buttons(raw) {
    const copy = iconButton("copy", "copy", () => copyText(this.answer, copy));
    const again = raw ? [] : [iconButton("again", "again", () => this._actions.again(this))];
    const fork = iconButton("fork", "forkHere", () => this._actions.fork(this));
    return make("div", { class: "actions" }, copy, ...again, fork);
  }

  _buttonsOfUser(raw) {
    const rewind = iconButton("rewind", "rewindHere", () => this._actions.rewind(this));
    const edit = raw ? [] : [iconButton("edit", "edit", () => this._edit())];
    return make("div", { class: "actions" }, rewind, ...edit);
  }

  /** Show that the answer is on its way. */
  begin() {
    this._began = performance.now();
    this.element.setAttribute("aria-busy", "true");
  }

  /** @param {string} piece of the thought */
  think(piece) {
    if (!this._thoughts) {
      const summary = make("summary", { text: "thinking" });
      const body = make("div", { class: "text" });
      this._details = make("details", { class: "thought" }, summary, body);
      this._reply.prepend(this._details);
      this._thoughts = new TextSink(body, this._written);
    }
    this.thought += piece;
    this._thoughts.append(piece);
  }

  /** @param {string} piece of the answer */
  write(piece) {
    if (this._thoughts) say(this._details.querySelector("summary"), "thought");
    this._sink.append(piece);
  }

  /**
   * The answer is complete.
   * @param {{number: number, tokens?: number, speed?: number, note?: string}} end `speed`: tokens a second, of
   *     one that has not come just now; `note`: the key of a text
   */
  finish({ number: place, tokens = 0, speed = 0, note = "" }) {
    this.number = place;
    this._settle();
    const seconds = (performance.now() - this._began) / 1000;
    this.speed = this._began ? tokens / Math.max(seconds, 0.001) : speed;
    if (tokens) {
      const words = make("span", {});
      const values = { count: number(tokens), speed: number(this.speed) };
      say(words, this.speed ? "speed" : "tokensOf", values);
      this._foot.append(words);
    }
    if (note) this._foot.append(make("span", { class: "mark", text: note }));
  }

  /** The answer will not be completed. @param {string} key of a text that says so */
  fail(key) {
    this._settle();
    this.element.classList.add("broken");
    this._foot.append(make("span", { class: "mark", text: key }));
  }

  _settle() {
    this._sink.flush();
    this._thoughts?.flush();
    if (this._thoughts) say(this._details.querySelector("summary"), "thought");
    this.element.removeAttribute("aria-busy");
  }

  /** Show that there are several. @param {import("./branches.js").Version[]} versions @param {string} id of this one */
  showVersions(versions, id) {
    const at = versions.findIndex((each) => each.id === id);
    this._versions.hidden = versions.length < 2 || at < 0;
    if (this._versions.hidden) return;
    const step = (name, label, to) => {
      const button = iconButton(name, label, () => this._actions.show(this, to.id));
      button.disabled = !to;
      return button;
    };
    const place = make("span", { content: `${number(at + 1)}/${number(versions.length)}` });
    this._versions.replaceChildren(
      step("before", "olderVersion", versions[at - 1]),
      place,
      step("after", "newerVersion", versions[at + 1]),
    );
  }

  /** Give the focus to the arrows, which another version has taken the place of. @param {boolean} back */
  focusVersions(back) {
    const [older, newer] = this._versions.querySelectorAll("button");
    [back ? older : newer, back ? newer : older].find((button) => button && !button.disabled)?.focus();
  }

  /** Let the message be changed where it stands. */
  _edit() {
    const { message, files } = apart(this.user);
    const field = make("textarea", { label: "editMessage", rows: "2" });
    field.value = message; // what goes with it goes with it again
    const close = () => {
      form.replaceWith(this._asked);
      this._asked.querySelector("button").focus();
    };
    const form = make(
      "form",
      { class: "edit" },
      field,
      make(
        "div",
        { class: "row end" },
        make("button", { type: "button", text: "cancel", on: { click: close } }),
        make("button", { type: "submit", class: "primary", text: "sendAgain" }),
      ),
    );
    form.addEventListener("submit", (event) => {
      event.preventDefault();
      const changed = withFiles(field.value.trim(), files);
      if (!changed) return;
      close();
      this._actions.again(this, changed);
    });
    form.addEventListener("keydown", (event) => {
      if (isComposing(event)) return;
      if (event.key === "Escape") {
        event.stopPropagation();
        close();
      } else if (event.key === "Enter" && !event.shiftKey && event.target === field) {
        event.preventDefault();
        form.requestSubmit();
      }
    });
    this._asked.replaceWith(form);
    field.focus();
  }
}

/** A message that stands before the answer: its heading, and itself. @returns {Element[]} */
function shown({ role, content }, raw) {
  const heading = make("h3", { class: "unseen", text: raw ? "prompt" : TITLES[role] });
  if (role !== "user" || raw) {
    const kind = raw ? "asked raw" : "said";
    return [heading, make("div", { class: role }, make("div", { class: kind }, folded(content)))];
  }
  const { message, files } = apart(content);
  const parts = files.map(({ name, content: inside }) => {
    const size = make("small", {});
    say(size, "characters", { count: number(inside.length) });
    const summary = make("summary", {}, make("span", { class: "name", content: name }), size);
    return make("details", { class: "file" }, summary, make("pre", { content: inside }));
  });
  if (message) parts.unshift(folded(message));
  return [heading, make("div", { class: role }, make("div", { class: "asked" }, ...parts))];
}

/** A text, of which only the beginning is shown at first where it is long. */
function folded(content) {
  const words = make("p", { content });
  if (content.length <= LONG) return words;
  words.className = "folded";
  const more = make("button", { type: "button", class: "quiet more", text: "showAll" });
  more.addEventListener("click", () => {
    say(more, words.classList.toggle("folded") ? "showAll" : "showLess");
  });
  return make("div", {}, words, more);
}

/** A stored turn as it looks when it has come. @param {import("./history.js").Turn} turn */
export function storedTurn(turn, actions) {
  const view = new TurnView(turn, actions, () => {});
  if (turn.thought) view.think(turn.thought);
  view.write(turn.answer);
  view.finish({ ...turn, speed: speedOf(turn) });
  return view;
}
