/**
 * Markdown that grows. Only its last block can change, so the others are made once; and where a block is so
 * large that making it again takes long, that is done less often.
 */

import { CodeBlock } from "./code.js";
import { later } from "./dom.js";
import { blocksOf, elementOf } from "./markdown.js";
import { reconcile } from "./reconcile.js";

const SHARE = 5; // it takes one of so many milliseconds
const FENCE = /^(`{3,}|~{3,})([^\n]*)\n/;
const DEFINITION = /^[ >]*\[[^\]]+\]:/m; // of a link
const MARKS_ONLY = /^[\s\-=*_#`~+>|:]+$/; // a line that may become another thing with its next character

export class MarkdownSink {
  /**
   * @param {HTMLElement} element whose text it is
   * @param {() => void} [written] is called after each write
   */
  constructor(element, written = () => {}) {
    this.element = element;
    this.text = "";
    this._written = written;
    this._settled = 0; // characters of the blocks that cannot change any more
    this._kept = 0; // their elements
    this._env = {}; // the links that are defined in them
    this._shown = 0; // characters of the text that are on the page
    this._fence = null; // the block of code that is open, if it is the last block
    this._next = 0; // the time before which nothing is written
  }

  /** @param {string} piece */
  append(piece) {
    this.text += piece;
    later(this);
  }

  /** Write what has come, unless that was done just now. */
  tick() {
    if (performance.now() < this._next) later(this);
    else this.flush(false);
  }

  /** Write what has come. @param {boolean} [complete] whether nothing follows */
  flush(complete = true) {
    if (this._shown === this.text.length && !complete) return;
    const began = performance.now();
    this._shown = this.text.length;
    while (this._fence ? this._growFence() : this._growBlocks(complete)) {
      // each turn settles something
    }
    if (complete) this._end();
    const ended = performance.now();
    this._next = ended + (ended - began) * (SHARE - 1);
    this._written();
  }

  /** Write the last block, and those behind it. @returns {boolean} whether there is more to be done */
  _growBlocks(complete) {
    const tail = this.text.slice(this._settled);
    const lines = tail.slice(0, tail.lastIndexOf("\n") + 1);
    const env = this._copyOfEnv();
    const blocks = blocksOf(lines, env);
    const settled = blocks.slice(0, -1).map(elementOf);
    if (settled.length) {
      this._env = env;
      reconcile(this.element, settled, this._kept);
      this._kept += settled.length;
      this._settled += offsetOf(tail, blocks.at(-1).line);
      return true;
    }
    const fence = FENCE.exec(tail);
    if (fence && !(fence[1][0] === "`" && fence[2].includes("`"))) return this._openFence(fence);
    const shown = complete ? tail : presentable(tail);
    reconcile(this.element, blocksOf(shown, this._copyOfEnv()).map(elementOf), this._kept);
    return false;
  }

  /** For a text whose end is not known: of a definition in it, a part may be all that has come. */
  _copyOfEnv() {
    return { references: { ...this._env.references } };
  }

  /** The last block is one of code, which may become long: what comes is appended. */
  _openFence([opening, marks, info]) {
    const block = new CodeBlock(info.trim().split(/\s/)[0]);
    reconcile(this.element, [], this._kept);
    this.element.append(block.element); // this very element, also where an equal one was there
    this._fence = { block, inLine: false, closing: new RegExp(`^ {0,3}[${marks[0]}]{${marks.length},}[ \\t]*$`) };
    this._settled += opening.length;
    return true;
  }

  _growFence() {
    const { block, closing } = this._fence;
    const tail = this.text.slice(this._settled);
    const lines = tail.split("\n");
    const last = lines.pop(); // is not complete
    const { inLine } = this._fence; // whether a part of the first line has been written already
    const end = lines.findIndex((line, index) => !(index === 0 && inLine) && closing.test(line));
    const code = (end < 0 ? lines : lines.slice(0, end)).map((line) => `${line}\n`).join("");
    if (code) block.write(code);
    this._settled += code.length;
    if (end < 0) {
      const begun = inLine && !lines.length;
      const closes = !begun && (MARKS_ONLY.test(last) || !last); // or may do so
      if (!closes && last) block.write(last);
      if (!closes) this._settled += last.length;
      this._fence.inLine = !closes;
      return false;
    }
    this._settled += lines[end].length + 1;
    this._closeFence();
    return true;
  }

  _closeFence() {
    this._fence.block.end();
    this._fence = null;
    this._kept += 1;
  }

  /** Nothing follows. Links may be defined behind the place where they stand. */
  _end() {
    if (this._fence) {
      const rest = this.text.slice(this._settled);
      if (this._fence.inLine || !this._fence.closing.test(rest)) this._fence.block.write(rest);
      this._settled = this.text.length;
      this._closeFence();
    }
    if (DEFINITION.test(this.text)) reconcile(this.element, blocksOf(this.text, {}).map(elementOf));
  }
}

/** Where a line begins. */
function offsetOf(text, line) {
  let at = 0;
  for (let count = 0; count < line; count += 1) at = text.indexOf("\n", at) + 1;
  return at;
}

/** The text with its open emphasis closed, and without marks at its end that mean nothing yet. */
function presentable(text) {
  const start = text.lastIndexOf("\n") + 1;
  if (MARKS_ONLY.test(text.slice(start))) return text.slice(0, start);
  const before = text.slice(0, text.lastIndexOf("\n\n") + 1);
  let last = text.slice(before.length);
  if (last.includes("```")) return text;
  last = last.replace(/[*`~]+$/, "");
  if ((last.split("`").length - 1) % 2) return `${before}${last}\``;
  if ((last.replace(/`[^`]*`/g, "").split("**").length - 1) % 2) return `${before}${last}**`;
  return before + last;
}
