/** A chat as a file of Markdown. */

import { make } from "./dom.js";
import { text } from "./texts.js";

const TITLES = { user: "you", assistant: "assistant", system: "systemMessage", tool: "toolMessage" };

/** @param {string} title @param {import("./history.js").Turn[]} turns */
export function transcript(title, turns) {
  const parts = [`# ${title}`];
  const add = (key, content) => parts.push(`## ${text(key)}`, content);
  for (const { asked, raw, thought, answer } of turns) {
    for (const { role, content } of asked) add(raw ? "prompt" : TITLES[role], content);
    if (thought) add("thought", thought.replace(/^/gm, "> "));
    add("assistant", answer);
  }
  return `${parts.map((part) => part.trim()).join("\n\n")}\n`;
}

/** Give a text or other data as a file. @param {BlobPart} data @param {string} name @param {string} type */
export function download(data, name, type) {
  const url = URL.createObjectURL(new Blob([data], { type }));
  make("a", { href: url, download: name.replace(/[/\\]/g, "_") }).click();
  setTimeout(() => URL.revokeObjectURL(url), 60000);
}
