/** Text files and long pasted texts that go with a message. */

import { notify } from "./announce.js";
import { byId, iconButton, make } from "./dom.js";
import { number, text } from "./texts.js";

const LONG = 2000; // characters of a pasted text that would fill the box
const MOST = 1 << 20; // bytes of a file
const FILE = /(?<!\n)\n*(?:^|\n)File: ([^\n]+)\n(`{3,})\n([^]*?)\n\2(?=\n|$)/g;

/** @typedef {{name: string, content: string}} Attached */
/** @type {Attached[]} */
let attached = [];

/** What goes with the message. */
export function attachments() {
  return attached;
}

/** Show these in place of those that are there. @param {Attached[]} wanted */
export function setAttachments(wanted) {
  attached = wanted;
  byId("attached").replaceChildren(...attached.map(chip));
  byId("attached").hidden = !attached.length;
}

function chip(one) {
  const size = text("characters", { count: number(one.content.length) });
  const words = make("span", { class: "name", content: one.name });
  const remove = iconButton("close", "removeFile", () => {
    setAttachments(attached.filter((each) => each !== one));
    byId("message").focus();
  });
  return make("li", { class: "file" }, words, make("small", { content: size }), remove);
}

/** A message and what goes with it, as one text. @param {string} message @param {Attached[]} files */
export function withFiles(message, files) {
  return [message, ...files.map(fileText)].filter(Boolean).join("\n\n");
}

function fileText({ name, content }) {
  let longest = 2;
  for (const [run] of content.matchAll(/`{3,}/g)) longest = Math.max(longest, run.length);
  const fence = "`".repeat(longest + 1);
  return `File: ${name}\n${fence}\n${content}\n${fence}`;
}

/** The other way round. @returns {{message: string, files: Attached[]}} */
export function apart(whole) {
  const files = [...whole.matchAll(FILE)].map(([, name, , content]) => ({ name, content }));
  return { message: whole.replace(FILE, "").trim(), files };
}

/** What a message is about, in a few words. */
export function subjectOf(whole) {
  const { message, files } = apart(whole);
  return message || files[0]?.name || "";
}

async function take(files) {
  for (const file of files) {
    if (file.size > MOST) notify(text("fileTooLarge", { name: file.name }), "error");
    else {
      const content = textOf(await file.arrayBuffer());
      if (content === null) notify(text("fileNoText", { name: file.name }), "error");
      else setAttachments([...attached, { name: file.name.replace(/\s+/g, " "), content }]);
    }
  }
  byId("message").focus();
}

/** @returns {string | null} null where it is no text */
function textOf(data) {
  try {
    const found = new TextDecoder("utf-8", { fatal: true }).decode(data);
    return found.includes("\0") ? null : found.replace(/\r\n?/g, "\n").replace(/\n+$/, "");
  } catch {
    return null;
  }
}

function pasted(event) {
  const { files } = event.clipboardData;
  const content = event.clipboardData.getData("text/plain");
  if (!content && files.length) {
    event.preventDefault();
    take(files);
  } else if (content.length > LONG) {
    event.preventDefault();
    setAttachments([...attached, { name: text("pastedText"), content: content.replace(/\r\n?/g, "\n") }]);
  }
}

export function startAttachments() {
  const input = byId("attach-file");
  byId("attach").addEventListener("click", () => input.click());
  input.addEventListener("change", async () => {
    const files = [...input.files];
    await take(files);
    input.value = "";
  });
  byId("message").addEventListener("paste", pasted);
  const chat = byId("chat");
  const holdsFiles = (event) => event.dataTransfer?.types.includes("Files");
  chat.addEventListener("dragover", (event) => {
    if (!holdsFiles(event)) return;
    event.preventDefault();
    chat.classList.add("dropping");
  });
  chat.addEventListener("dragleave", (event) => {
    if (!chat.contains(event.relatedTarget)) chat.classList.remove("dropping");
  });
  chat.addEventListener("drop", (event) => {
    chat.classList.remove("dropping");
    if (!holdsFiles(event)) return;
    event.preventDefault();
    take([...event.dataTransfer.files]);
  });
}
