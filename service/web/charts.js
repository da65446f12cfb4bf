// Small charts of the last minute: figures as text, their course as a picture.

import { element, number, setText, svg } from "./dom.js";

const SAMPLES = 60;
const WIDTH = 240;
const HEIGHT = 48;

/** series: [{ name, unit?, digits?, color }], stacked upon each other. ceiling: the least value of the chart's top. */
export class Chart {
  constructor(title, series, ceiling = 1) {
    this._title = title;
    this._series = series;
    this._ceiling = ceiling;
    this._samples = [];
    this._values = series.map(() => element("dd", {}, "–"));
    this._areas = series.map(({ color }) => svg("path", { class: `area ${color}` }));
    this._lines = series.map(({ color }) => svg("path", { class: `line ${color}` }));
    this._picture = svg(
      "svg",
      { viewBox: `0 0 ${WIDTH} ${HEIGHT}`, preserveAspectRatio: "none", role: "img", "aria-label": `${title}: no numbers yet` },
      svg("path", { class: "base", d: `M0 ${HEIGHT - 0.5}H${WIDTH}` }),
      ...this._areas.toReversed(), // the lowest series is drawn last: where the others are 0 they share its line
      ...this._lines.toReversed(),
    );
    this.root = element(
      "figure",
      { className: "chart" },
      element("figcaption", {}, title),
      element("dl", {}, ...series.map((one, row) => this._legend(one, this._values[row]))),
      this._picture,
    );
  }

  _legend({ name, color }, value) {
    const swatch = element("span", { className: `swatch ${color}`, "aria-hidden": "true" });
    return element("div", {}, element("dt", {}, swatch, name), value);
  }

  /** values: one for each series; null where there is none. */
  push(values) {
    this._samples = [...this._samples, values].slice(-SAMPLES);
    const told = this._series.map((one, row) => this._tell(one, values[row]));
    told.forEach((text, row) => setText(this._values[row], text));
    const spoken = this._series.map(({ name }, row) => `${told[row]} ${name}`).join(", ");
    this._picture.setAttribute("aria-label", `${this._title} in the last minute, now ${spoken}`);
    this._draw();
  }

  _tell({ unit = "", digits = 0 }, value) {
    if (value === null) return "–";
    return `${number(value, value > 0 && value < 100 ? digits : 0)}${unit}`;
  }

  _draw() {
    const stacks = this._samples.map(stacked);
    const top = Math.max(this._ceiling, ...stacks.map((stack) => stack.at(-1))) * 1.05;
    const x = (place) => WIDTH - ((this._samples.length - 1 - place) * WIDTH) / (SAMPLES - 1);
    const y = (value) => HEIGHT - 1 - (value / top) * (HEIGHT - 2);
    this._series.forEach((_, row) => {
      const upper = stacks.map((stack, place) => point(x(place), y(stack[row])));
      const lower = stacks.map((stack, place) => point(x(place), y(row ? stack[row - 1] : 0)));
      this._lines[row].setAttribute("d", `M${upper.join("L")}`);
      this._areas[row].setAttribute("d", `M${upper.join("L")}L${lower.reverse().join("L")}Z`);
    });
  }
}

function stacked(values) {
  let sum = 0;
  return values.map((value) => (sum += value ?? 0));
}

const point = (x, y) => `${x.toFixed(1)} ${y.toFixed(1)}`;
