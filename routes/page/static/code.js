/** Blocks of code: their language, a button that copies them, and colours. */

import { copyText } from "./clipboard.js";
import { iconButton, make, TextSink } from "./dom.js";
import { reconcile, unfinished } from "./reconcile.js";

const MOST_LIVE = 8000; // characters that are coloured again and again as they come
const MOST = 200_000; // characters that are coloured at all

let highlighter = null; // once it is here
let loading = null;

/** Ask for the highlighter, which a chat without code does not need. */
function load() {
  loading ??= import("./vendor/highlight.min.js").then((module) => (highlighter = module.default));
  return loading;
}

/** A block whose code is complete. @param {string} code @param {string} language as the fence names it */
export function codeBlock(code, language) {
  const block = new CodeBlock(language);
  block.write(code);
  block.end();
  return block.element;
}

/** A block whose code may still grow. Its complete lines are coloured, and behind them stands the rest. */
export class CodeBlock {
  /** @param {string} language */
  constructor(language) {
    this._language = language;
    this._text = "";
    this._coloured = make("div", {});
    this._rest = new TextSink(make("div", {}));
    const bar = make(
      "figcaption",
      {},
      make("span", { content: language || "text" }),
      iconButton("copy", "copyCode"),
    );
    const body = make("pre", { tabindex: "0" }, make("code", {}, this._coloured, this._rest.element));
    this.element = make("figure", { class: "code" }, bar, body);
    this._ended = false;
    if (!highlighter) {
      unfinished.add(this.element); // also without a language, which may be what comes next
      if (language) load().then(() => this._loaded());
    }
  }

  /** @param {string} piece of the code */
  write(piece) {
    this._text += piece;
    const complete = this._text.lastIndexOf("\n") + 1; // characters of complete lines
    const coloured = this._text.length - this._rest.text.length - piece.length;
    if (this._text.length <= MOST_LIVE && complete > coloured && this._knows()) this._colour(complete);
    else {
      this._rest.append(piece);
      this._rest.flush();
    }
  }

  /** The code is complete. */
  end() {
    this._ended = true;
    if (this._text.length <= MOST && this._knows()) this._colour(this._text.length);
  }

  _loaded() {
    unfinished.delete(this.element);
    if (this._ended) this.end();
    else this.write("");
  }

  _knows() {
    return Boolean(this._language && highlighter?.getLanguage(this._language));
  }

  /** Colour the code as far as a place in it. */
  _colour(end) {
    const options = { language: this._language, ignoreIllegals: true };
    const found = highlighter.highlight(this._text.slice(0, end), options);
    reconcile(this._coloured, found._emitter.rootNode.children.map(spanOf));
    this._rest.reset(this._text.slice(end));
  }
}

/** A node of the highlighter's tree. @param {string | {scope?: string, children: any[]}} node */
function spanOf(node) {
  if (typeof node === "string") return document.createTextNode(node);
  const span = document.createElement("span");
  if (node.scope) span.className = node.scope.split(".").map((part) => `hl-${part}`).join(" ");
  span.append(...node.children.map(spanOf));
  return span;
}

/** Let the buttons of all blocks below an element copy. @param {Element} root */
export function copyCodeOf(root) {
  root.addEventListener("click", ({ target }) => {
    const button = target.closest(".code > figcaption > button");
    if (button) copyText(button.closest(".code").querySelector("code").textContent, button);
  });
}
