/**
 * Markdown as elements.
 *
 * markdown-it makes tokens, and these become elements one by one: no text of a model is ever parsed as HTML,
 * which the page's policy forbids too. DOMPurify looks at the result.
 */

import { codeBlock } from "./code.js";
import { make } from "./dom.js";
import { withMath } from "./math.js";
import MarkdownIt from "./vendor/markdown-it.esm.min.mjs";
import "./vendor/purify.min.js"; // which makes a global DOMPurify

const ADDRESS = /^(?:https?:\/\/|mailto:)/i; // what a link may lead to
const TAGS = ["p", "h1", "h2", "h3", "h4", "h5", "h6", "ul", "ol", "li", "blockquote", "hr", "br", "table"];
const CELLS = ["thead", "tbody", "tr", "th", "td"];
const WORDS = ["em", "strong", "s", "code", "a", "span"];
const ATTRIBUTES = ["href", "target", "rel", "title", "start", "class", "tabindex"];
const SAFE = {
  IN_PLACE: true,
  ALLOWED_TAGS: [...TAGS, ...CELLS, ...WORDS, "div"],
  ALLOWED_ATTR: ATTRIBUTES,
  ALLOW_DATA_ATTR: false,
  ALLOW_ARIA_ATTR: false,
  ALLOWED_URI_REGEXP: ADDRESS,
  ADD_URI_SAFE_ATTR: ATTRIBUTES.filter((name) => name !== "href"),
  TRUSTED_TYPES_POLICY: null, // nothing is parsed
};

const parser = withMath(new MarkdownIt({ html: false, linkify: true, breaks: true }));
parser.linkify.set({ fuzzyLink: false, fuzzyEmail: false, fuzzyIP: false });
parser.validateLink = (address) => ADDRESS.test(address.trim());

/**
 * The top-level blocks of a text.
 * @param {string} source
 * @param {object} env keeps the definitions of links from one call to the next
 * @returns {{line: number, tokens: object[]}[]} each with its first line, and without the space between them
 */
export function blocksOf(source, env) {
  const blocks = [];
  for (const token of parser.parse(source, env)) {
    if (token.level === 0 && token.nesting >= 0) blocks.push({ line: token.map?.[0] ?? 0, tokens: [] });
    blocks.at(-1).tokens.push(token);
  }
  return blocks;
}

/** A block as one element. */
export function elementOf({ tokens }) {
  const root = document.createElement("div");
  const codes = []; // the places of blocks of code, and these
  fill(root, tokens, codes);
  window.DOMPurify.sanitize(root, SAFE);
  for (const { place, token } of codes) {
    place.replaceWith(codeBlock(token.content, token.info.trim().split(/\s/)[0]));
  }
  return root.firstChild ?? document.createElement("p");
}

/** Append what tokens make. */
function fill(root, tokens, codes) {
  const open = [root];
  for (const token of tokens) {
    const inner = open.at(-1);
    if (token.type === "inline") fill(inner, token.children, codes);
    else if (token.nesting === 1) {
      const element = token.hidden ? inner : opened(inner, token);
      open.push(element);
    } else if (token.nesting === -1) open.pop();
    else if (["fence", "code_block"].includes(token.type)) {
      const place = document.createElement("div");
      codes.push({ place, token });
      inner.append(place);
    } else inner.append(...single(token));
  }
}

/** The element that a token opens, in its place. */
function opened(inner, token) {
  const element = document.createElement(SAFE.ALLOWED_TAGS.includes(token.tag) ? token.tag : "span");
  if (token.tag === "a") linked(element, token.attrGet("href") ?? "");
  if (token.tag === "ol" && token.attrGet("start")) element.start = Number(token.attrGet("start"));
  const align = /text-align:(left|right|center)/.exec(token.attrGet("style") ?? "");
  if (align) element.className = align[1]; // a style would be against the policy
  if (token.tag !== "table") inner.append(element);
  else inner.append(make("div", { class: "scroll", tabindex: "0" }, element));
  return element;
}

/** Let a link open a page of its own, which learns nothing of this one. */
function linked(element, address) {
  element.href = address;
  element.title = address;
  element.target = "_blank";
  element.rel = "noopener noreferrer nofollow";
}

/** The nodes of a token that holds no others. */
function single(token) {
  switch (token.type) {
    case "text":
      return [token.content];
    case "softbreak":
    case "hardbreak":
      return [document.createElement("br"), "\n"];
    case "code_inline":
      return [make("code", { content: token.content })];
    case "hr":
      return [document.createElement("hr")];
    case "math_inline":
      return [make("span", { class: "math", content: token.content })];
    case "math_block":
      return [make("div", { class: "math", tabindex: "0", content: token.content })];
    case "image":
      return [picture(token)];
    default:
      return [token.content];
  }
}

/** A picture of another host is not asked for before somebody wants to see it. */
function picture(token) {
  const address = token.attrGet("src") ?? "";
  const link = make("a", { content: token.content || address });
  linked(link, address);
  return link;
}
