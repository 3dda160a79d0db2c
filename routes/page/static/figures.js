/** Live figures from /stats, in a view of their own and in one line that is always there. */

import { json } from "./api.js";
import { connection, isLost } from "./connection.js";
import { byId, make } from "./dom.js";
import { chosenModel } from "./models.js";
import { password } from "./password.js";
import { number, say } from "./texts.js";

const PAUSE = 2000; // milliseconds between two readings
const PAUSE_BUSY = 500; // the same while rows run, many of which end sooner
const LAST = 120; // seconds in the curve
const SVG = "http://www.w3.org/2000/svg";
const WIDTH = 600;
const HEIGHT = 120;

/** @type {{time: number, tokens: number} | null} */
let before = null;
/** @type {{time: number, speed: number}[]} tokens a second, newest last */
let speeds = [];
let timer = 0;
let open = false; // whether the view is shown: only there somebody is asked for a password
let latest = null;
// A server may have a password for these alone.
let kind = password("metrics-password") ? "metrics-password" : "password";

async function read() {
  clearTimeout(timer);
  if (!document.hidden && !isLost() && chosenModel()) {
    try {
      note(await json("stats", { kind, quiet: kind === "password" || !open }));
    } catch (error) {
      byId("figures-problem").textContent = open ? error.message : "";
      byId("pulse").hidden = true;
      if (error.status === 401) {
        const first = kind === "password"; // which is right elsewhere
        kind = "metrics-password";
        if (first && open) read();
        return; // otherwise the view asks when it is opened
      }
    }
  }
  timer = setTimeout(read, latest && running(latest) ? PAUSE_BUSY : PAUSE);
}

function note(stats) {
  const tokens = sum(stats, (model) => model.generation_tokens);
  const time = performance.now() / 1000;
  const grown = before && tokens >= before.tokens ? (tokens - before.tokens) / (time - before.time) : 0;
  before = { time, tokens };
  speeds = [...speeds.filter((each) => time - each.time < LAST), { time, speed: grown }];
  latest = stats;
  byId("figures-problem").textContent = "";
  byId("pulse").hidden = false;
  // Rows that have only read their prompts until now have no speed, which is not a speed of 0.
  const key = running(stats) && !grown ? "pulseBegun" : "pulse";
  say(byId("pulse-text"), key, { speed: number(grown), running: number(running(stats)) });
  byId("pulse").classList.toggle("busy", running(stats) > 0);
  if (open) render();
}

const sum = (stats, of) => stats.models.reduce((total, model) => total + of(model), 0);
const running = (stats) => sum(stats, (model) => model.running);

/** Show the latest reading. */
export function renderFigures() {
  if (latest) render();
}

function render() {
  const stats = latest;
  const tile = (key, value, note = "") => {
    const of = note ? [make("small", { content: note })] : [];
    return make("div", { class: "tile" }, make("dt", { text: key }), make("dd", {}, value, ...of));
  };
  const ofRows = make("small", {});
  say(ofRows, "ofRows", { count: number(sum(stats, (model) => model.rows)) });
  const rows = tile("runningRows", number(running(stats)));
  rows.querySelector("dd").append(ofRows);
  byId("tiles").replaceChildren(
    tile("speedNow", number(speeds.at(-1).speed)),
    rows,
    tile("waitingRows", number(sum(stats, (model) => model.waiting))),
    tile("batchSize", number(stats.dynamic_batching.stats.avg_batch_size, 1)),
    tile("madeTokens", number(sum(stats, (model) => model.generation_tokens))),
    tile("readTokens", number(sum(stats, (model) => model.prompt_tokens))),
    tile("requests", number(stats.dynamic_batching.stats.total_requests)),
    tile("idle", `${number(stats.device_idle_ratio * 100)} %`),
  );
  byId("model-rows").replaceChildren(
    ...stats.models.map((model) =>
      make(
        "tr",
        {},
        make("th", { scope: "row", content: model.model }),
        ...[model.device, ...["L1", "L2", "L3"].map((tier) => number(model.sessions[tier]))].map((value) =>
          make("td", { content: value }),
        ),
      ),
    ),
  );
  byId("server-version").textContent = stats.version;
  curve();
}

/** Tokens a second as a curve, newest on the right. */
function curve() {
  const most = Math.max(...speeds.map(({ speed }) => speed), 1);
  const now = speeds.at(-1).time;
  const place = (time) => WIDTH - ((now - time) / LAST) * WIDTH;
  const left = place(speeds[0].time);
  const points = speeds.map(({ time, speed }) => {
    const y = HEIGHT - 6 - (speed / most) * (HEIGHT - 24);
    return `${place(time).toFixed(1)},${y.toFixed(1)}`;
  });
  const line = document.createElementNS(SVG, "polyline");
  line.setAttribute("points", points.join(" "));
  const area = document.createElementNS(SVG, "polygon");
  area.setAttribute("points", `${left.toFixed(1)},${HEIGHT} ${points.join(" ")} ${WIDTH},${HEIGHT}`);
  byId("curve").replaceChildren(area, line);
  byId("curve-most").textContent = number(most);
}

/** The view is shown, or no longer. */
export function showFigures(shown) {
  const opened = shown && !open;
  open = shown;
  if (opened) {
    renderFigures();
    read();
  }
}

export function startFigures() {
  document.addEventListener("visibilitychange", () => {
    if (!document.hidden) read();
  });
  connection.addEventListener("lost", () => {
    byId("pulse").hidden = true;
    before = null;
  });
  connection.addEventListener("back", read);
  read();
}
