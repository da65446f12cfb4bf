// The page: sends what the form says, shows what becomes of it.

import { ApiError, apiKey, call } from "./api.js";
import { curl, python } from "./code.js";
import { arrange } from "./columns.js";
import { byId, copy, element, number, plural, setText } from "./dom.js";
import { watchEngine } from "./engine.js";
import { check, clearProblems, complain, readRequest, setUpForm, showModels } from "./form.js";
import { Run } from "./run.js";

let run = null; // the one that is on its way
let needsKey = apiKey.get() !== "";
let countdown = 0;
let announcement = 0;

setUpForm();
const engine = watchEngine({
  async models() {
    const { data } = await (await call("v1/models")).json();
    showModels(data);
    return data[0]?.id ?? "no model";
  },
  needsKey: () => askForKey(apiKey.get() ? "This key is not known here." : ""),
});

// -- sending and stopping

async function send() {
  if (run !== null || !check()) return;
  hideNotice();
  const before = [...byId("voices").children];
  byId("agreement").hidden = true;
  byId("empty").hidden = true;
  run = new Run(readRequest(), { changed: showProgress, failed: showError });
  byId("voices").replaceChildren(...run.voices.map((voice) => voice.root));
  arrange();
  showBusy(true);
  if (byId("answers").getBoundingClientRect().top > innerHeight / 3) byId("answers").scrollIntoView();
  announce(`${plural(run.voices.length, "voice")} asked.`);
  try {
    await run.finish();
    announce(`All ended: ${summary(run)}.`);
  } catch (error) {
    showError(error);
    if (run.tokens === 0) restore(before);
  } finally {
    showAgreement(run);
    run = null;
    showBusy(false);
  }
}

/** Nothing came: what was there before is still of use. */
function restore(answers) {
  byId("voices").replaceChildren(...answers);
  arrange();
  setText(byId("summary"), "");
  byId("empty").hidden = answers.length > 0;
}

function stop() {
  if (run === null) return;
  announce("Stopping all voices.");
  run.stop();
}

function showBusy(isBusy) {
  byId("send").setAttribute("aria-disabled", String(isBusy));
  byId("stop-all").setAttribute("aria-disabled", String(!isBusy));
  byId("stop-here").hidden = !isBusy;
  byId("answers").setAttribute("aria-busy", String(isBusy));
}

// -- what the answers say

function showProgress(shown) {
  setText(byId("summary"), summary(shown));
  const { numEnded } = shown;
  if (numEnded !== shown.announcedEnds && numEnded && shown.endedAt === null) {
    shown.announcedEnds = numEnded;
    announce(`${numEnded} of ${shown.voices.length} voices have ended.`);
  }
}

function summary({ voices, numEnded, tokens, seconds, endedAt, usage }) {
  const parts = [endedAt === null ? `${numEnded} of ${voices.length} ended` : plural(voices.length, "voice")];
  if (tokens) parts.push(plural(tokens, "token"), `${number(tokens / seconds)} tok/s together`);
  parts.push(`${number(seconds, 1)} s`);
  if (usage) {
    const cached = usage.prompt_tokens_details?.cached_tokens;
    parts.push(`prompt ${plural(usage.prompt_tokens, "token")}${cached ? `, ${number(cached)} cached` : ""}`);
  }
  return parts.join(" · ");
}

function showAgreement({ agreement, voices, request }) {
  if (agreement === null) return;
  const { answer, count, reached, indices } = agreement;
  const wanted = request.fan_out.agree.count;
  const text = typeof answer === "string" ? answer : JSON.stringify(answer);
  const most = count ? `No ${wanted} agree. Most often, ${plural(count, "time")}: ` : "No voice gave an answer.";
  const lead = reached ? `${plural(count, "voice agrees", "voices agree")}: ` : most;
  byId("agreement").replaceChildren(lead, ...(count ? [element("q", { dir: "auto" }, text)] : []));
  byId("agreement").dataset.reached = String(reached);
  byId("agreement").hidden = false;
  for (const index of indices) voices[index].root.dataset.agrees = String(reached);
}

/** Politely, and only the newest of what comes quickly one after the other. */
function announce(text) {
  clearTimeout(announcement);
  announcement = setTimeout(() => setText(byId("status"), text), 400);
}

// -- what goes wrong

function showError(error) {
  if (!(error instanceof ApiError)) throw error;
  if (error.status === 401) {
    askForKey(apiKey.get() ? "This key is not known here." : "", send);
    return;
  }
  if (error.status === 400 && complain(error.param, error.message)) return;
  showNotice(TITLES[error.status] ?? "That did not work", error.message, error.retryAfter);
}

const TITLES = {
  0: "Connection lost",
  200: "The answer broke off",
  400: "The server did not take this request",
  429: "The server is busy",
  503: "The server is not ready",
};

function showNotice(title, message, retryAfter) {
  const again = element("button", { type: "button" }, "Send again");
  again.addEventListener("click", () => again.getAttribute("aria-disabled") !== "true" && send());
  byId("notice").replaceChildren(element("b", {}, title), element("p", { dir: "auto" }, message), again);
  byId("notice").hidden = false;
  clearInterval(countdown);
  if (retryAfter === null) return;
  let left = Math.ceil(retryAfter);
  const tell = () => {
    setText(again, left > 0 ? `Send again in ${left} s` : "Send again");
    again.setAttribute("aria-disabled", String(left > 0));
    if (left-- <= 0) clearInterval(countdown);
  };
  tell();
  countdown = setInterval(tell, 1000);
}

function hideNotice() {
  clearInterval(countdown);
  clearProblems();
  byId("notice").hidden = true;
}

// -- the key

let afterKey = null;

function askForKey(problem = "", then = null) {
  needsKey = true;
  afterKey = then;
  byId("key-button").hidden = false;
  byId("key-forget").hidden = apiKey.get() === "";
  setText(byId("key-problem"), problem);
  byId("key").value = "";
  if (!byId("key-dialog").open) byId("key-dialog").showModal();
  byId("key").focus();
}

byId("key-button").hidden = !needsKey;
byId("key-button").addEventListener("click", () => askForKey());
byId("key-dialog").addEventListener("close", () => {
  const { returnValue } = byId("key-dialog");
  byId("key-dialog").returnValue = "";
  const given = byId("key").value.trim();
  byId("key").value = ""; // nothing of it stays in the page
  if (returnValue === "forget") apiKey.set("");
  else if (returnValue === "save") apiKey.set(given);
  else return;
  engine.refresh().then(() => returnValue === "save" && afterKey?.());
});

// -- the request as code

function showCode() {
  if (!check()) return;
  const language = byId("code-dialog").querySelector(":checked").value;
  const url = new URL("v1/", document.baseURI).href;
  const request = showCode.request;
  setText(byId("code"), (language === "curl" ? curl : python)(request, url, needsKey));
}

byId("code-button").addEventListener("click", () => {
  if (!check()) return;
  showCode.request = readRequest();
  showCode();
  byId("code-dialog").showModal();
});
byId("code-dialog").addEventListener("change", showCode);
byId("code-close").addEventListener("click", () => byId("code-dialog").close());
byId("code-copy").addEventListener("click", async () => {
  const done = await copy(byId("code").textContent, byId("code"));
  setText(byId("code-copy"), done ? "Copied" : "Selected");
  setTimeout(() => setText(byId("code-copy"), "Copy"), 1500);
});

// -- buttons and keys

byId("composer").addEventListener("submit", (event) => {
  event.preventDefault();
  send();
});
byId("stop-all").addEventListener("click", stop);
byId("stop-here").addEventListener("click", stop);
document.addEventListener("keydown", (event) => {
  if (document.querySelector("dialog[open]")) return;
  if (event.key === "Escape") stop();
  if (event.key === "Enter" && (event.ctrlKey || event.metaKey)) {
    event.preventDefault();
    send();
  }
});
