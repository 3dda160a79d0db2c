/** Formulas in Markdown: what stands between $ and $, $$ and $$, \( and \), \[ and \] stays as it is written. */

// A mark without an end is searched for as far as this, so that many of them take no time that grows by itself.
const MOST = 1000; // characters of a formula in a line
const MOST_LINES = 100; // of one that has lines of its own
const INLINE = [
  ["$$", "$$"],
  ["\\(", "\\)"],
  ["\\[", "\\]"],
];
const BLOCK = [
  ["$$", "$$"],
  ["\\[", "\\]"],
];

/** Add the rules to a parser of markdown-it. */
export function withMath(parser) {
  parser.inline.ruler.before("escape", "math", inlineRule);
  parser.block.ruler.before("fence", "math", blockRule, {
    alt: ["paragraph", "reference", "blockquote", "list"],
  });
  return parser;
}

function inlineRule(state, silent) {
  const { src, pos } = state;
  for (const [opening, closing] of INLINE) {
    if (!src.startsWith(opening, pos)) continue;
    const start = pos + opening.length;
    const length = src.slice(start, start + MOST).indexOf(closing);
    return taken(state, silent, start, length < 0 ? -1 : start + length, closing.length);
  }
  if (src[pos] !== "$" || /\s/.test(src[pos + 1] ?? " ")) return false;
  return taken(state, silent, pos + 1, endOfDollars(src, pos + 1), 1);
}

/** Where a formula between single dollars ends: not behind a blank or before a digit, as "$5 and $6" is none. */
function endOfDollars(src, start) {
  const line = src.slice(start, start + MOST).split("\n", 1)[0];
  const length = line.search(/(?<![\s\\])\$/);
  for (let at = length; at >= 0; at = line.indexOf("$", at + 1)) {
    if (!/[\s\\]/.test(line[at - 1] ?? " ") && !/\d/.test(src[start + at + 1] ?? "")) return start + at;
  }
  return -1;
}

function taken(state, silent, start, end, closing) {
  if (end < 0 || !state.src.slice(start, end).trim()) return false;
  if (!silent) state.push("math_inline", "", 0).content = state.src.slice(start, end).trim();
  state.pos = end + closing;
  return true;
}

/** A formula that begins a line and ends one. */
function blockRule(state, from, to, silent) {
  const line = (number) => state.src.slice(state.bMarks[number] + state.tShift[number], state.eMarks[number]);
  const first = line(from).trim();
  const marks = BLOCK.find(([opening]) => first.startsWith(opening));
  if (!marks || state.sCount[from] - state.blkIndent >= 4) return false;
  const [opening, closing] = marks;
  const rest = first.slice(opening.length);
  const lines = [];
  let last = from;
  if (rest.trimEnd().endsWith(closing)) lines.push(rest.trimEnd().slice(0, -closing.length));
  else {
    if (rest.includes(closing)) return false; // there is text behind it
    lines.push(rest);
    for (last = from + 1; ; last += 1) {
      if (last >= to || last - from > MOST_LINES || state.sCount[last] < state.blkIndent) return false;
      const next = line(last).trimEnd();
      if (next.endsWith(closing)) {
        lines.push(next.slice(0, -closing.length));
        break;
      }
      lines.push(next);
    }
  }
  const content = lines.join("\n").trim();
  if (!content) return false;
  if (silent) return true;
  const token = state.push("math_block", "", 0);
  token.content = content;
  token.map = [from, last + 1];
  state.line = last + 1;
  return true;
}
