// One choice: its column, and what is known of it.

import { copy, element, number, plural, setText } from "./dom.js";

const ENDS = {
  stop: "ended by itself",
  length: "token limit",
  deadline: "out of time",
  cancelled: "stopped",
  error: "failed",
  lost: "not all of it came",
};

export class Voice {
  /** seed: a number. stop(voice): called when its button is. */
  constructor(index, seed, stop) {
    this.index = index;
    this.end = null;
    this.tokens = 0;
    this.text = "";
    this.stoppedHere = false;
    this._stop = stop;
    this._unpainted = { text: "", reasoning: "" };
    this._firstAt = null;
    this._lastAt = null;
    this._sticks = true;
    this._build(seed);
  }

  get name() {
    return `Voice ${this.index + 1}`;
  }

  _build(seed) {
    this._shown = { text: document.createTextNode(""), reasoning: document.createTextNode("") };
    this._reasoning = element("div", { className: "reasoning", dir: "auto", hidden: true }, this._shown.reasoning);
    this._answer = element("div", { className: "text", dir: "auto" }, this._shown.text);
    this._scroller = element("div", { className: "said" }, this._reasoning, this._answer);
    this._state = element("span", { className: "state" }, "waiting");
    this._rate = element("span", { className: "rate" });
    this._count = element("span", { className: "count" });
    this._button = element("button", { type: "button", className: "quiet" }, "Stop");
    this.root = element(
      "li",
      { className: "voice" },
      element(
        "div",
        { className: "voice-head" },
        element("h3", {}, this.name),
        element("span", { className: "seed", title: `seed ${seed}` }, `seed ${seed}`),
        this._button,
      ),
      this._scroller,
      element(
        "div",
        { className: "voice-foot" },
        this._state,
        element("span", { className: "figures" }, this._count, this._rate),
      ),
    );
    this.root.dataset.state = "waiting";
    this._name("Stop");
    this._button.setAttribute("aria-disabled", "true"); // until the request has an id
    this._button.addEventListener("click", () => this._pressed());
    this._scroller.addEventListener("scroll", () => {
      const { scrollTop, scrollHeight, clientHeight } = this._scroller;
      this._sticks = scrollHeight - scrollTop - clientHeight < 24;
    });
  }

  allowStop() {
    if (this.end === null) this._button.removeAttribute("aria-disabled");
  }

  /** choice: of a chunk. */
  add(choice, now) {
    const text = choice.delta?.content ?? "";
    const reasoning = choice.delta?.reasoning_content ?? "";
    const count = choice.token_ids?.length ?? (text || reasoning ? 1 : 0);
    if (count || text) {
      this._firstAt ??= now;
      this._lastAt = now;
      this.tokens += count;
    }
    this.text += text;
    this._unpainted.text += text;
    this._unpainted.reasoning += reasoning;
    if (choice.finish_reason) this.finish(choice.end_reason ?? choice.finish_reason, choice);
  }

  /** reason: the API's end_reason, or "lost". details: stop_reason and error, where there are such. */
  finish(reason, { stop_reason = null, error = null } = {}) {
    if (this.end !== null) return;
    this.end = reason;
    let why = ENDS[reason] ?? "";
    if (reason === "stop" && typeof stop_reason === "string") why = `matched ${JSON.stringify(stop_reason)}`;
    if (reason === "cancelled") why = this.stoppedHere ? "stopped by you" : "not needed";
    if (error?.message) why = error.message;
    this._why = why;
  }

  /** Tokens a second from the first token to the last one, null until there are two. */
  get rate() {
    const seconds = (this._lastAt - this._firstAt) / 1000;
    return this.tokens > 1 && seconds > 0 ? (this.tokens - 1) / seconds : null;
  }

  /** First all voices' `paint`, then all their `follow`: so the page is laid out once for all of them. */
  paint() {
    const { text, reasoning } = this._unpainted;
    this._unpainted = { text: "", reasoning: "" };
    if (reasoning) {
      this._reasoning.hidden = false;
      this._shown.reasoning.appendData(reasoning);
    }
    if (text) this._shown.text.appendData(text);
    this._paintState();
  }

  follow() {
    if (this._sticks) this._scroller.scrollTop = 1e9;
  }

  _paintState() {
    const state = this.end ?? (this._firstAt === null ? "waiting" : "running");
    if (this.root.dataset.state !== state) {
      this.root.dataset.state = state;
      this._state.replaceChildren(element("b", {}, state), this.end && this._why ? ` ${this._why}` : "");
      if (this.end !== null) {
        this._name("Copy");
        this._button.removeAttribute("aria-disabled");
        if (this.text === "") this._scroller.append(element("p", { className: "nothing" }, "No text."));
      }
    }
    setText(this._count, this.tokens ? plural(this.tokens, "token") : "");
    setText(this._rate, this.rate === null ? "" : `${number(this.rate, this.rate < 9.95 ? 1 : 0)} tok/s`);
  }

  _name(action) {
    setText(this._button, action);
    this._button.setAttribute("aria-label", `${action} voice ${this.index + 1}`);
  }

  async _pressed() {
    if (this._button.getAttribute("aria-disabled") === "true") return;
    if (this.end === null) {
      this._button.setAttribute("aria-disabled", "true");
      setText(this._button, "Stopping");
      this.stoppedHere = true;
      this._stop(this);
    } else {
      setText(this._button, (await copy(this.text, this._answer)) ? "Copied" : "Selected");
      setTimeout(() => this._name("Copy"), 1500);
    }
  }
}
