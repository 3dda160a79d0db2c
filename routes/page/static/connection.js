/** Whether the server can be reached. When it cannot, /health is asked until it can. */

import { byId } from "./dom.js";
import { announce } from "./announce.js";
import { say, text } from "./texts.js";

const PAUSE = 1000; // milliseconds between two tries

/** Tells of "lost" and "back". */
export const connection = new EventTarget();
let lost = false;

export function isLost() {
  return lost;
}

/** A request has not reached the server. */
export function connectionLost() {
  if (lost) return;
  lost = true;
  show("unreachable");
  connection.dispatchEvent(new Event("lost"));
  setTimeout(tryAgain, PAUSE);
}

/** A request was answered 503: that may be for this request only, or the server has no model. */
export async function checkConnection() {
  if (!lost && (await health()) !== "ready") connectionLost();
}

/** "ready", another status of /health, or "" where there is no answer. */
async function health() {
  try {
    const response = await fetch("health", { cache: "no-store" });
    return (await response.json()).status ?? "";
  } catch {
    return "";
  }
}

async function tryAgain() {
  const status = await health();
  if (status !== "ready") {
    show(status ? "notReady" : "unreachable");
    setTimeout(tryAgain, PAUSE);
    return;
  }
  lost = false;
  byId("connection").hidden = true;
  announce(text("back"));
  connection.dispatchEvent(new Event("back"));
}

function show(key) {
  const banner = byId("connection-text");
  if (banner.dataset.text !== key || byId("connection").hidden) say(banner, key);
  byId("connection").hidden = false;
}
