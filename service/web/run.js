// One request on its way: reads its stream as fast as it comes, and paints what has come now and then.

import { ApiError, LOST, call, errorEvent, events } from "./api.js";
import { Voice } from "./voice.js";

const PATIENCE_MS = 3000; // for the last words of a request that was told to stop

export class Run {
  /** changed(run): called after each painting. failed(error): when the stop of a voice is refused. */
  constructor(request, { changed, failed }) {
    this.request = request;
    this.usage = null;
    this.agreement = null;
    this.voices = Array.from(
      { length: request.n },
      (_, index) => new Voice(index, request.seed + index, (voice) => this._stopVoice(voice)),
    );
    this.startedAt = performance.now();
    this.endedAt = null;
    this._changed = changed;
    this._failed = failed;
    this._id = null;
    this._abort = new AbortController();
    this._touched = new Set();
    this._nextPaint = 0;
    this._stopping = false;
  }

  get tokens() {
    return this.voices.reduce((sum, voice) => sum + voice.tokens, 0);
  }

  get seconds() {
    return ((this.endedAt ?? performance.now()) - this.startedAt) / 1000;
  }

  get numEnded() {
    return this.voices.filter((voice) => voice.end !== null).length;
  }

  /** Until all has ended. Throws ApiError for what went wrong, before the stream or in it; not for a stop. */
  async finish() {
    this._frame = requestAnimationFrame((now) => this._paint(now));
    let rest = "cancelled"; // how voices end that the stream does not end
    try {
      await this._read();
    } catch (error) {
      if (this._stopping) return;
      rest = error.status === 200 ? "error" : "lost"; // 200: an event that tells of an error
      throw error;
    } finally {
      cancelAnimationFrame(this._frame);
      this.endedAt = performance.now();
      for (const voice of this.voices) voice.finish(rest);
      this._paintAll(this.voices);
    }
  }

  async _read() {
    const response = await this._post();
    this._id = response.headers.get("X-Chorus-Response-Id");
    for (const voice of this.voices) voice.allowStop();
    for await (const batch of events(response)) {
      const now = performance.now();
      for (const data of batch) {
        if (data === "[DONE]") return;
        this._take(JSON.parse(data), now);
      }
    }
    throw new ApiError(LOST);
  }

  async _post() {
    const options = { method: "POST", body: this.request, signal: this._abort.signal };
    try {
      return await call("v1/chat/completions", options);
    } catch (error) {
      if (error.status !== 400 || error.param !== "return_token_ids") throw error;
      delete this.request.return_token_ids; // an engine that gives none: what is counted are pieces, then
      return await call("v1/chat/completions", options);
    }
  }

  _take(chunk, now) {
    if (chunk.error) throw errorEvent(chunk.error);
    for (const choice of chunk.choices) {
      const voice = this.voices[choice.index];
      voice.add(choice, now);
      this._touched.add(voice);
    }
    this.usage = chunk.usage ?? this.usage;
    this.agreement = chunk.fan_out?.agree ?? this.agreement;
  }

  /** A quarter of the time at most: what is left is for reading, however many voices there are. */
  _paint(now) {
    if (now >= this._nextPaint) {
      const began = performance.now();
      this._paintAll(this._touched);
      this._touched.clear();
      this._nextPaint = now + 4 * (performance.now() - began);
    }
    this._frame = requestAnimationFrame((next) => this._paint(next));
  }

  _paintAll(voices) {
    for (const voice of voices) voice.paint();
    for (const voice of voices) voice.follow();
    this._changed(this);
  }

  /** All choices end with what they have. Before the request has an id there is nothing to wait for. */
  async stop() {
    if (this._stopping || this.endedAt !== null) return;
    this._stopping = true;
    for (const voice of this.voices) voice.stoppedHere ||= voice.end === null;
    if (this._id === null) {
      this._abort.abort();
      return;
    }
    setTimeout(() => this._abort.abort(), PATIENCE_MS);
    await this._delete("").catch(() => this._abort.abort());
  }

  _stopVoice(voice) {
    this._delete(`/choices/${voice.index}`).catch((error) => {
      if (error.status !== 404) this._failed(error); // 404: it has just ended by itself
    });
  }

  _delete(path) {
    return call(`v1/requests/${encodeURIComponent(this._id)}${path}`, { method: "DELETE" });
  }
}
