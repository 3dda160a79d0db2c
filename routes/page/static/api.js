/** Calls of the server's routes, with the password as a header. */

import { checkConnection, connectionLost } from "./connection.js";
import { askPassword, password } from "./password.js";
import { events } from "./sse.js";
import { text } from "./texts.js";

const PATIENCE = 3000; // milliseconds after which a request that should end is dropped

/** What went wrong, in a sentence. `status` 0: the server was not reached. */
export class Problem extends Error {
  constructor(message, status = 0) {
    super(message);
    this.name = "Problem";
    this.status = status;
  }
}

/**
 * @typedef {object} CallOptions
 * @property {any} [body] sent as JSON by POST, a Blob as it is; without one it is a GET
 * @property {Record<string, string>} [headers]
 * @property {AbortSignal} [signal]
 * @property {string} [kind] whose password is sent
 * @property {boolean} [quiet] whether nobody is asked for a password
 */

/**
 * Call a route; the response is one of success. Throws Problem, or an AbortError.
 * @param {string} path
 * @param {CallOptions} [options]
 */
export async function call(path, { body, headers = {}, signal, kind = "password", quiet = false } = {}) {
  for (;;) {
    const given = password(kind);
    const response = await reach(path, {
      method: body === undefined ? "GET" : "POST",
      body: body === undefined || body instanceof Blob ? body : JSON.stringify(body),
      headers: { ...headers, ...(given === null ? {} : { Authorization: `Bearer ${given}` }) },
      cache: "no-store",
      signal,
    });
    if (response.ok) return response;
    if (response.status !== 401 || quiet) throw await problemOf(response);
    await askPassword(kind, given).catch(() => {
      throw new Problem(text("passwordMissing"), 401);
    });
  }
}

/** Call a route that answers with JSON. @param {string} path @param {CallOptions} [options] */
export async function json(path, options) {
  const response = await call(path, options);
  let found;
  try {
    found = await response.json();
  } catch (error) {
    if (error.name === "AbortError") throw error;
    connectionLost();
    throw new Problem(text("noConnection"));
  }
  if (found?.error) throw new Problem(messageOf(found), response.status); // it came after the status was sent
  return found;
}

/**
 * Call a route that answers with events.
 * @param {string} path
 * @param {CallOptions & {accepted?: () => void}} options `accepted` is called when the server has taken it
 */
export async function* stream(path, { accepted = () => {}, ...options }) {
  const response = await call(path, options);
  accepted();
  try {
    for await (const event of events(response)) {
      if (event.error) throw new Problem(messageOf(event), event.error.code ?? 500);
      yield event;
    }
  } catch (error) {
    if (error instanceof Problem || error.name === "AbortError") throw error;
    connectionLost();
    throw new Problem(text("noConnection"));
  }
}

/** A request whose texts can be ended; its stream then ends as usual. */
export class TextRequest {
  constructor() {
    this.id = requestId();
    this.stopping = false;
    this._abort = new AbortController();
    this._timer = 0;
  }

  /** What a call takes of it. */
  get options() {
    return { headers: { "X-Request-Id": this.id }, signal: this._abort.signal };
  }

  /** End the texts where they are; drop the request if it does not end then. */
  async stop() {
    if (this.stopping) return;
    this.stopping = true;
    this._timer = setTimeout(() => this._abort.abort(), PATIENCE);
    try {
      await json("v1/server/stop", { body: { request_id: this.id } });
    } catch {
      this._abort.abort();
    }
  }

  /** Its stream has ended. */
  ended() {
    clearTimeout(this._timer);
  }
}

function requestId() {
  const bytes = crypto.getRandomValues(new Uint8Array(12));
  return `page-${[...bytes].map((byte) => byte.toString(16).padStart(2, "0")).join("")}`;
}

async function reach(path, request) {
  try {
    return await fetch(path, request);
  } catch (error) {
    if (error.name === "AbortError") throw error;
    connectionLost();
    throw new Problem(text("noConnection"));
  }
}

/** @param {Response} response */
async function problemOf(response) {
  if (response.status === 503) checkConnection();
  const found = await response.json().catch(() => null);
  return new Problem(messageOf(found) ?? text("strange", { status: response.status }), response.status);
}

/** The sentence of an error in any of the server's forms. */
function messageOf(found) {
  const error = found?.error ?? found?.message;
  return typeof error === "object" && error ? error.message : error;
}
