/** How one turn of a conversation looks: what was asked, the thought folded, the answer. */

import { copyText } from "./clipboard.js";
import { iconButton, make, TextSink } from "./dom.js";
import { MarkdownSink } from "./streamed.js";
import { number, say, text } from "./texts.js";

/**
 * @typedef {object} TurnActions
 * @property {(view: TurnView) => void} rewind
 * @property {(view: TurnView) => void} fork
 */

/** One turn in the document. */
export class TurnView {
  /**
   * @param {{asked: import("./history.js").Message[], raw?: boolean}} turn
   * @param {TurnActions} actions
   * @param {() => void} written is called when the answer has grown
   */
  constructor({ asked, raw = false }, actions, written) {
    this.user = asked.findLast(({ role }) => role === "user")?.content ?? "";
    this.number = 0; // its place in the session, once the server has it
    this._written = written;
    this._thought = null;
    this._began = 0;
    const buttons = make("div", { class: "actions" });
    buttons.append(iconButton("rewind", "rewindHere", () => actions.rewind(this)));
    this._answer = make("div", { class: "text markdown" });
    this._foot = make("p", { class: "foot" });
    this._forks = make("div", { class: "actions" });
    this._forks.append(iconButton("fork", "forkHere", () => actions.fork(this)));
    const copy = iconButton("copy", "copy", () => copyText(this.answer, copy));
    this._forks.append(copy);
    this._reply = make("div", { class: "reply" }, this._answer);
    const under = make("div", { class: "under" }, this._foot, this._forks);
    this.element = make(
      "article",
      { class: "turn" },
      ...asked.flatMap((message) => shown(message, raw)),
      make("h3", { class: "unseen", text: "assistant" }),
      make("div", { class: "assistant" }, this._reply, under),
    );
    [...this.element.querySelectorAll(".user")].at(-1)?.prepend(buttons);
    this._sink = new MarkdownSink(this._answer, written);
  }

  get answer() {
    return this._sink.text;
  }

  /** Show that the answer is on its way. */
  begin() {
    this._began = performance.now();
    this.element.setAttribute("aria-busy", "true");
  }

  /** @param {string} piece of the thought */
  think(piece) {
    if (!this._thought) {
      const summary = make("summary", { text: "thinking" });
      const body = make("div", { class: "text" });
      this._details = make("details", { class: "thought" }, summary, body);
      this._reply.prepend(this._details);
      this._thought = new TextSink(body, this._written);
    }
    this._thought.append(piece);
  }

  /** @param {string} piece of the answer */
  write(piece) {
    if (this._thought) say(this._details.querySelector("summary"), "thought");
    this._sink.append(piece);
  }

  /**
   * The answer is complete.
   * @param {{number: number, tokens?: number, note?: string}} end `note`: the key of a text
   */
  finish({ number: place, tokens = 0, note = "" }) {
    this.number = place;
    this._settle();
    const seconds = (performance.now() - this._began) / 1000;
    if (tokens && this._began) {
      const values = { count: number(tokens), speed: number(tokens / Math.max(seconds, 0.001)) };
      this._foot.append(make("span", { content: text("speed", values) }));
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
    this._thought?.flush();
    if (this._thought) say(this._details.querySelector("summary"), "thought");
    this.element.removeAttribute("aria-busy");
  }
}

const TITLES = { user: "you", assistant: "assistant", system: "systemMessage", tool: "toolMessage" };

/** A message that stands before the answer: its heading, and itself. @returns {Element[]} */
function shown({ role, content }, raw) {
  const heading = make("h3", { class: "unseen", text: raw ? "prompt" : TITLES[role] });
  const kind = role === "user" ? (raw ? "asked raw" : "asked") : "said";
  return [heading, make("div", { class: role }, make("div", { class: kind }, make("p", { content })))];
}

/** A stored turn as it looks when it has come. @param {import("./history.js").Turn} turn */
export function storedTurn(turn, actions) {
  const view = new TurnView(turn, actions, () => {});
  if (turn.thought) view.think(turn.thought);
  view.write(turn.answer);
  view.finish({ number: turn.number });
  return view;
}
