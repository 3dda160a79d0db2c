/** A batch: one prompt, many rows at once, each in a card that fills as its tokens come. */

import { stream, TextRequest } from "./api.js";
import { announce } from "./announce.js";
import { byId, isComposing, make, showOneOf, TextSink, valueOf } from "./dom.js";
import { chosenModel } from "./models.js";
import { number, say } from "./texts.js";

const GIVEN = 80; // characters of a prompt that are shown in front of its continuation
const ROUTES = { chat: "openai/v1/chat/completions", raw: "v1/completions" };

/** @type {TextRequest | null} */
let running = null;

/** The cards by what their heights are seen by, all of them at once. @type {WeakMap<Element, RowCard>} */
const cut = new WeakMap();
const heights = new ResizeObserver((entries) => {
  for (const { target } of entries) cut.get(target).measure();
});

/** One row in the document. */
class RowCard {
  /** @param {number} index @param {string} given the end of the prompt, where the row continues it */
  constructor(index, given) {
    this.finished = "";
    this.pieces = 0;
    this._state = make("span", { class: "state", text: "waiting" });
    const body = make("div", { class: "words" });
    this._box = make("div", { class: "text" }, body);
    this._more = make("button", { type: "button", class: "quiet more", text: "showAll", hidden: true });
    this._more.addEventListener("click", () => this._unfold());
    const title = make("h3", {});
    say(title, "row", { number: index + 1 });
    this._box.setAttribute("role", "group");
    this._box.setAttribute("aria-labelledby", (title.id = `row-${index}`));
    this.element = make("li", { class: "card" }, make("header", {}, title, this._state), this._box, this._more);
    this.element.dataset.state = "waiting";
    this.sink = new TextSink(body, undefined, given && make("span", { class: "given", content: given }));
    cut.set(body, this);
    heights.observe(body);
  }

  write(piece) {
    if (!this.pieces) this._show("running");
    this.pieces += 1;
    this.sink.append(piece);
  }

  /** @param {string} reason "stop", "length", "error" or another one of the server's */
  finish(reason) {
    this.finished = reason;
    this.sink.flush();
    this._show({ length: "end_length", error: "end_error" }[reason] ?? "end_stop");
  }

  /** Say so where the card is too low for its text. */
  measure() {
    const hides = this._box.scrollHeight > this._box.clientHeight + 1;
    if (!this.element.classList.contains("whole")) this._more.hidden = !hides;
    this.element.classList.toggle("hides", hides);
  }

  /** Show all of the text, or the part that fits. */
  _unfold() {
    const whole = this.element.classList.toggle("whole");
    say(this._more, whole ? "showLess" : "showAll");
    this.measure();
  }

  _show(state) {
    this.element.dataset.state = state;
    say(this._state, state);
  }
}

async function run() {
  const prompt = byId("batch-prompt").value.trim();
  if (!prompt || running) return;
  const rows = Math.min(Math.max(Math.trunc(valueOf("batch-rows", 16)), 1), 1024);
  const given = byId("batch-form").value === "raw" ? prompt.slice(-GIVEN) : "";
  heights.disconnect();
  const cards = Array.from({ length: rows }, (_, index) => new RowCard(index, given));
  byId("batch-grid").replaceChildren(...cards.map((card) => card.element));
  problem("");
  running = new TextRequest();
  busy(true);
  const began = performance.now();
  let frame = 0;
  const progress = () => {
    frame = 0;
    byId("batch-bar").value = cards.filter((card) => card.finished).length / rows;
    say(byId("batch-progress"), "progress", counted(cards));
  };
  progress();
  try {
    let usage = null;
    const options = { body: requestOf(prompt, rows), ...running.options };
    for await (const event of stream(ROUTES[byId("batch-form").value], options)) {
      usage = event.usage ?? usage;
      for (const choice of event.choices) {
        const piece = choice.text ?? (choice.delta.reasoning_content ?? "") + (choice.delta.content ?? "");
        if (piece) cards[choice.index].write(piece);
        if (choice.finish_reason) cards[choice.index].finish(choice.finish_reason);
      }
      frame ||= requestAnimationFrame(progress);
    }
    cancelAnimationFrame(frame);
    progress();
    finished(cards, usage?.completion_tokens ?? 0, (performance.now() - began) / 1000);
  } catch (error) {
    cancelAnimationFrame(frame);
    progress();
    if (error.name !== "AbortError") problem(error.message);
  } finally {
    running.ended();
    running = null;
    busy(false);
  }
}

function requestOf(prompt, rows) {
  const isChat = byId("batch-form").value === "chat";
  return {
    model: chosenModel(),
    ...(isChat ? { messages: [{ role: "user", content: prompt }] } : { prompt }),
    n: rows,
    stream: true,
    stream_options: { include_usage: true },
    temperature: valueOf("batch-temperature"),
    top_p: valueOf("batch-top-p"),
    max_tokens: valueOf("batch-max-tokens"),
  };
}

/** @param {RowCard[]} cards */
function counted(cards) {
  const done = cards.filter((card) => card.finished);
  return {
    done: number(done.length),
    rows: number(cards.length),
    different: number(new Set(done.map((card) => card.sink.text.trim())).size),
    tokens: number(cards.reduce((sum, card) => sum + card.pieces, 0)),
  };
}

function finished(cards, tokens, seconds) {
  const line = byId("batch-progress");
  const counts = counted(cards);
  if (running.stopping) say(line, "batchStopped", counts);
  else {
    const speed = number(tokens / Math.max(seconds, 0.001));
    say(line, "batchDone", { ...counts, tokens: number(tokens), seconds: number(seconds, 1), speed });
  }
  announce(line.textContent);
}

/** End all rows where they are. */
function stop() {
  running?.stop();
}

function busy(is) {
  if (is) showOneOf(byId("batch-stop"), byId("batch-run"));
  else showOneOf(byId("batch-run"), byId("batch-stop"));
  byId("batch-status").hidden = false;
  byId("batch-grid").setAttribute("aria-busy", String(is));
}

function problem(message) {
  byId("batch-problem").textContent = message;
  byId("batch-problem").hidden = !message;
}

export function startBatch() {
  byId("batch-ask").addEventListener("submit", (event) => {
    event.preventDefault();
    run();
  });
  byId("batch-prompt").addEventListener("keydown", (event) => {
    if (isComposing(event) || event.key !== "Enter" || event.shiftKey) return;
    event.preventDefault();
    run();
  });
  byId("batch-stop").addEventListener("click", stop);
  byId("batch").addEventListener("keydown", (event) => {
    if (event.key === "Escape" && !isComposing(event)) stop();
  });
}
