// Columns of one width in rows of one length: four voices where three would fit are two and two.

import { byId } from "./dom.js";

const LEAST = 250; // pixels of a column
const GAP = 14;

const voices = byId("voices");

export function arrange() {
  const count = voices.childElementCount;
  const fit = Math.max(1, Math.floor((voices.clientWidth + GAP) / (LEAST + GAP)));
  voices.style.setProperty("--columns", Math.ceil(count / Math.ceil(count / fit)) || 1);
}

new ResizeObserver(arrange).observe(voices);
