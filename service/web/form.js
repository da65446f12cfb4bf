// The form: what it asks for, and what is wrong with it.

import { byId, element, setText } from "./dom.js";

const form = byId("composer");
const agree = byId("agree");
const AGREE_LABELS = { regex: "Regex", json_pointer: "JSON pointer" };
const AGREE_HINTS = { regex: "answer is (\\w+)", json_pointer: "/answer" };

export const EXAMPLES = [
  { title: "Three takes on one line", prompt: "Write the first line of a story about a lighthouse.", n: 3 },
  {
    title: "Ask five, stop when three agree",
    prompt: "Name the capital of France. Answer with one word.",
    n: 5,
    max_tokens: 12,
    agree: "text",
    count: 3,
  },
  { title: "The first two of eight", prompt: "Suggest a name for a small bakery, and say why.", n: 8, stop_after: 2 },
];

export function setUpForm() {
  agree.addEventListener("change", showAgreement);
  form.addEventListener("input", ({ target }) => clearProblem(target));
  for (const example of EXAMPLES) {
    const button = element("button", { type: "button" }, element("b", {}, example.title), example.prompt);
    button.addEventListener("click", () => fillIn(example));
    byId("examples").append(element("li", {}, button));
  }
  showAgreement();
}

function fillIn(example) {
  byId("prompt").value = example.prompt;
  byId("n").value = example.n;
  byId("max_tokens").value = example.max_tokens ?? 200;
  byId("stop_after").value = example.stop_after ?? "";
  agree.value = example.agree ?? "";
  byId("agree-count").value = example.count ?? 2;
  showAgreement();
  clearProblems();
  byId("send").focus();
}

function showAgreement() {
  byId("agree-more").hidden = agree.value === "";
  byId("agree-value-field").hidden = !(agree.value in AGREE_LABELS);
  setText(byId("agree-value-label"), AGREE_LABELS[agree.value] ?? "");
  byId("agree-value").placeholder = AGREE_HINTS[agree.value] ?? "";
}

export function showModels(cards) {
  const select = byId("model");
  const chosen = select.value;
  select.replaceChildren(...cards.map(({ id }) => element("option", { value: id }, id)));
  if (cards.some(({ id }) => id === chosen)) select.value = chosen;
}

/** The request that the form stands for. Without a seed it gets one here, so that each voice's is known. */
export function readRequest() {
  const system = byId("system").value;
  const messages = [{ role: "user", content: byId("prompt").value }];
  if (system.trim()) messages.unshift({ role: "system", content: system });
  return {
    model: byId("model").value,
    messages,
    n: value("n"),
    temperature: value("temperature"),
    max_tokens: value("max_tokens"),
    seed: value("seed") ?? crypto.getRandomValues(new Uint32Array(1))[0],
    stream: true,
    stream_options: { include_usage: true },
    return_token_ids: true, // they are counted
    fan_out: fanOut(),
  };
}

function fanOut() {
  const options = { on_error: "isolate" };
  if (value("stop_after") !== undefined) options.stop_after = value("stop_after");
  if (agree.value) {
    options.agree = { on: agree.value, count: value("agree-count") };
    if (agree.value in AGREE_LABELS) options.agree.value = byId("agree-value").value;
  }
  return options;
}

/** undefined, which JSON leaves out, for an empty field. */
function value(id) {
  const number = byId(id).valueAsNumber;
  return Number.isNaN(number) ? undefined : number;
}

/** Whether the form can be sent; else the problems are shown, and the first one has the focus. */
export function check() {
  clearProblems();
  if (!byId("prompt").value.trim()) showProblem(byId("prompt"), "A prompt is needed.");
  for (const field of form.elements) {
    if (field.type === "number" && field.offsetParent && !field.checkValidity()) {
      showProblem(field, field.validationMessage);
    }
  }
  const n = value("n");
  for (const field of [byId("stop_after"), byId("agree-count")]) {
    if (field.offsetParent && field.valueAsNumber > n) showProblem(field, `At most ${n}, as there are voices.`);
  }
  const first = form.querySelector("[aria-invalid]");
  first?.focus();
  return first === null;
}

/** Shows the server's complaint at the field that it names. Returns whether there is one. */
export function complain(param, message) {
  const names = [param, param?.replace(/[.[].*$/, "")];
  const field = [...form.elements].find(({ name }) => name && names.includes(name));
  if (!field?.offsetParent) return false;
  showProblem(field, message);
  field.focus();
  return true;
}

function showProblem(field, message) {
  field.setAttribute("aria-invalid", "true");
  setText(byId(field.getAttribute("aria-describedby")), message);
}

function clearProblem(field) {
  if (!field.hasAttribute?.("aria-invalid")) return;
  field.removeAttribute("aria-invalid");
  setText(byId(field.getAttribute("aria-describedby")), "");
}

export function clearProblems() {
  for (const field of form.querySelectorAll("[aria-invalid]")) clearProblem(field);
}
