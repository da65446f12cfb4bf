// The engine now: its state, and its numbers from /metrics, once a second while somebody looks.

import { call } from "./api.js";
import { Chart } from "./charts.js";
import { byId, setText } from "./dom.js";

const INTERVAL_MS = 1000;
const READY_EVERY = 10;

const charts = {
  choices: new Chart("Choices", [
    { name: "running", color: "one" },
    { name: "waiting", color: "two" },
  ], 4),
  pages: new Chart("KV pages", [
    { name: "held", color: "one" },
    { name: "cached", color: "two" },
    { name: "free", color: "three" },
  ]),
  step: new Chart("Step time", [{ name: "mean", unit: " ms", digits: 1, color: "one" }], 1),
  tokens: new Chart("Tokens", [{ name: "per second", color: "one" }], 10),
};

let last = null;
let ticks = 0;

/** models(): called whenever the server has come to be ready. needsKey(error): when it wants a key. */
export function watchEngine({ models, needsKey }) {
  byId("charts").append(...Object.values(charts).map((chart) => chart.root));
  const state = { models, needsKey, model: null, isReady: false, isLocked: false };
  let round = 0;
  const loop = async (own) => {
    if (!document.hidden) await tick(state);
    if (own === round) setTimeout(() => own === round && loop(own), INTERVAL_MS);
  };
  loop(round);
  /** Ask for everything again, now. */
  return {
    refresh() {
      Object.assign(state, { model: null, isReady: false, isLocked: false });
      round += 1;
      return loop(round);
    },
  };
}

async function tick(state) {
  if (state.isLocked) return; // nothing changes until there is a key, and then all is asked again
  if (!state.isReady || ticks % READY_EVERY === 0) await askReady(state);
  ticks += 1;
  if (!state.isLocked) await askMetrics(state);
}

async function askReady(state) {
  state.isReady = false;
  try {
    state.model ??= await state.models(); // it has a name before it is loaded
    await call("health/ready");
    state.isReady = true;
    showServer("ready", state.model);
  } catch (error) {
    if (error.status === 401) lock(state);
    else showServer(error.status === 503 ? "waiting" : "gone", error.message);
  }
}

function lock(state) {
  state.isLocked = true;
  showServer("waiting", "An API key is needed");
  setText(byId("engine-note"), "Shown once there is a key.");
  state.needsKey();
}

function showServer(state, text) {
  byId("server").dataset.state = state;
  setText(byId("server-text"), text);
}

async function askMetrics(state) {
  let text;
  try {
    text = await (await call("metrics")).text();
  } catch (error) {
    last = null;
    state.isReady &&= error.status !== 0;
    setText(byId("engine-note"), absence(error));
    byId("charts").dataset.stale = "true";
    return;
  }
  setText(byId("engine-note"), "the last minute");
  byId("charts").dataset.stale = "false";
  show(read(text));
}

function absence(error) {
  if (error.status === 404) return "This server tells its numbers at another address.";
  return `No numbers: ${error.message}`;
}

/** Sample name with its labels to value, of what the charts show. */
function read(text) {
  const samples = new Map();
  for (const line of text.split("\n")) {
    if (!line.startsWith("chorus_")) continue;
    const space = line.lastIndexOf(" ");
    samples.set(line.slice(0, space), Number(line.slice(space + 1)));
  }
  return samples;
}

function show(samples) {
  const now = { at: performance.now(), samples };
  const of = (name) => samples.get(name) ?? null;
  const grown = (name) => (last === null ? null : samples.get(name) - last.samples.get(name));
  const steps = grown("chorus_step_seconds_count");
  const seconds = last === null ? 0 : (now.at - last.at) / 1000;
  const tokens = grown("chorus_generation_tokens_total");
  charts.choices.push([of("chorus_sequences_running"), of("chorus_sequences_waiting")]);
  charts.pages.push(["held", "cached", "free"].map((state) => of(`chorus_kv_pages{state="${state}"}`)));
  charts.step.push([steps > 0 ? (1000 * grown("chorus_step_seconds_sum")) / steps : null]);
  charts.tokens.push([tokens !== null && seconds > 0 ? tokens / seconds : null]);
  last = now;
}
