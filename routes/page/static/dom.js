/** Elements, and text that comes piece by piece. Text enters the document as text, never as HTML. */

import { icon } from "./icons.js";
import { localize } from "./texts.js";

/** The element of an id. @returns {HTMLElement} */
export function byId(id) {
  return document.getElementById(id);
}

/**
 * A new element. `text`, `label`, `hint` and `tip` are keys of texts; `content` is text as it is.
 * @param {string} tag
 * @param {Record<string, any>} [properties] `on` holds listeners by event, others are attributes
 * @param {...(Node | string)} children
 */
export function make(tag, properties = {}, ...children) {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(properties)) {
    if (name === "on")
      for (const [event, listener] of Object.entries(value)) element.addEventListener(event, listener);
    else if (["text", "label", "hint", "tip"].includes(name)) element.dataset[name] = value;
    else if (name === "content") element.textContent = value;
    else if (value === true) element.setAttribute(name, "");
    else if (value !== false && value !== undefined) element.setAttribute(name, value);
  }
  element.append(...children);
  const holder = document.createDocumentFragment();
  holder.append(element);
  localize(holder);
  return element;
}

/** Show one of two buttons, which takes the focus where the other one had it. */
export function showOneOf(shown, other) {
  const focused = document.activeElement === other;
  other.hidden = true;
  shown.hidden = false;
  if (focused) shown.focus();
}

/** Whether a key belongs to an input method, which Safari says by its code only. */
export function isComposing(event) {
  return event.isComposing || event.keyCode === 229;
}

/** The number in a field, or what counts without one; undefined leaves the choice to the server. */
export function valueOf(id, otherwise = undefined) {
  const value = byId(id).valueAsNumber;
  return Number.isFinite(value) ? value : otherwise;
}

/** A button that shows an icon only, with a label for those who do not see it. */
export function iconButton(name, label, listener) {
  return make(
    "button",
    { type: "button", class: "quiet", label, tip: label, on: { click: listener } },
    icon(name),
  );
}

/** Those that have new text; one frame writes them all. @type {Set<{tick: () => void}>} */
const waiting = new Set();
let frame = 0;

/** Have a sink write in the next frame. @param {{tick: () => void}} sink */
export function later(sink) {
  waiting.add(sink);
  frame ||= requestAnimationFrame(writeAll);
}

function writeAll() {
  frame = 0;
  const sinks = [...waiting];
  waiting.clear();
  for (const sink of sinks) sink.tick();
}

/**
 * Text that grows. What comes within a frame is written at once, and each line is a block of its own, so
 * that a long answer is not laid out again from its beginning.
 */
export class TextSink {
  /**
   * @param {HTMLElement} element whose text it is
   * @param {() => void} [written] is called after each write
   * @param {Node | ""} [lead] what stands in front of the text
   */
  constructor(element, written = () => {}, lead = "") {
    this.element = element;
    this._lead = lead;
    this.text = "";
    this._written = written;
    this._pending = "";
    this._line = null;
  }

  /** @param {string} piece */
  append(piece) {
    this.text += piece;
    this._pending += piece;
    later(this);
  }

  tick() {
    this.flush();
  }

  /** Begin again, with another text. */
  reset(text) {
    this.element.replaceChildren();
    this.text = this._pending = "";
    this._line = null;
    this.append(text);
    this.flush();
  }

  /** Write what has come. */
  flush() {
    waiting.delete(this);
    if (!this._pending) return;
    const lines = this._pending.split(/(?<=\n)/);
    this._pending = "";
    for (const line of lines) {
      if (!this._line) {
        this._line = document.createTextNode("");
        const block = document.createElement("div");
        block.append(this._lead, this._line);
        this._lead = "";
        this.element.append(block);
      }
      this._line.appendData(line);
      if (line.endsWith("\n")) this._line = null;
    }
    this._written();
  }
}
