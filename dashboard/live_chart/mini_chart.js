// A small chart of the last ten minutes: lines over time, drawn anew each second, with the values
// under the pointer. Where nothing was read for some seconds a line has a gap.

import { el, setAttribute, setText, svg } from "./dom.js";
import { clock, isNumber, withUnit } from "./format.js";

export const KEPT_S = 600;
const SHORTEST_S = 60; // so that the first seconds do not fill the width
const GAP_S = 3.5;
const [WIDTH, HEIGHT] = [600, 100];

// The path of a line in the drawing's own units; `top` is the value at its upper edge.
export function linePath(times, values, [from, to], top) {
  const parts = [];
  let last = null;
  times.forEach((time, at) => {
    const value = values[at];
    if (!isNumber(value)) return;
    const x = ((time - from) / (to - from)) * WIDTH;
    const y = HEIGHT - (Math.max(0, Math.min(value, top)) / top) * HEIGHT;
    const pen = last === null || time - last > GAP_S ? "M" : "L";
    parts.push(`${pen}${x.toFixed(1)} ${y.toFixed(1)}`);
    last = time;
  });
  return parts.join("");
}

// The upper edge: what the GPU can do where it is known, else a little above what was seen.
export function topOf(chart, values) {
  if (isNumber(chart.top) && chart.top > 0) return chart.top;
  const highest = Math.max(0, chart.mark?.value ?? 0, ...values.flat().filter(isNumber));
  const least = chart.unit === "B/s" ? 2 ** 20 : 0; // a still link is no wave
  return 1.08 * Math.max(highest, least) || 1;
}

export class MiniChart {
  constructor() {
    this.title = el("h4", {});
    this.legend = el("div", { class: "dv-legend" });
    this.lines = svg("g", {});
    this.mark = svg("path", { class: "dv-mark" });
    this.drawing = svg(
      "svg",
      { viewBox: `0 0 ${WIDTH} ${HEIGHT}`, preserveAspectRatio: "none", role: "img" },
      this.mark,
      this.lines,
    );
    this.top = el("span", { class: "dv-top" });
    this.cursor = el("span", { class: "dv-cursor", hidden: "" });
    this.stage = el("div", { class: "dv-stage" }, this.drawing, this.cursor);
    this.begin = el("span", {});
    this.when = el("span", {}, "now");
    this.node = el(
      "figure",
      { class: "dv-chart" },
      el("figcaption", {}, this.title, this.top),
      this.legend,
      this.stage,
      el("div", { class: "dv-axis" }, this.begin, this.when),
    );
    this.stage.addEventListener("pointermove", (event) => this.point(event));
    this.stage.addEventListener("pointerleave", () => this.point(null));
    this.at = null;
  }

  draw(chart, history, now) {
    this.chart = chart;
    this.history = history;
    this.span = [Math.min(history.t[0] ?? now, now - SHORTEST_S), now];
    this.values = chart.lines.map(({ key }) => history.v[key] ?? []);
    this.build(chart);
    const top = topOf(chart, this.values);
    chart.lines.forEach((line, at) =>
      setAttribute(this.paths[at], "d", linePath(history.t, this.values[at], this.span, top)),
    );
    this.drawMark(chart, top);
    setText(this.title, chart.title);
    setText(this.top, `0–${withUnit(top, chart.unit)}`);
    setText(this.begin, `${clock(this.span[1] - this.span[0])} ago`);
    this.tell();
  }

  build({ lines }) {
    const text = lines.map(({ key }) => key).join();
    if (text === this.text) return;
    this.text = text;
    this.paths = lines.map(({ color }) => svg("path", { style: `stroke:var(--ss-${color})` }));
    this.lines.replaceChildren(...this.paths);
    this.numbers = lines.map(() => el("b", {}));
    const chips = lines.map(({ label, color }, at) =>
      el(
        "span",
        {},
        el("i", { style: `background:var(--ss-${color})`, "aria-hidden": "true" }),
        `${label} `,
        this.numbers[at],
      ),
    );
    this.limit = el("span", { class: "dv-limit" });
    this.legend.replaceChildren(...chips, this.limit);
  }

  drawMark({ mark, unit }, top) {
    const y = mark ? HEIGHT - (mark.value / top) * HEIGHT : 0;
    setAttribute(this.mark, "d", mark ? `M0 ${y.toFixed(1)}H${WIDTH}` : "");
    setText(this.limit, mark ? `${mark.label} ${withUnit(mark.value, unit)}` : "");
  }

  point(event) {
    this.at = null;
    if (event && this.history?.t.length) {
      const { left, width } = this.stage.getBoundingClientRect();
      const [from, to] = this.span;
      const time = from + ((event.clientX - left) / width) * (to - from);
      this.at = this.history.t.reduce(
        (best, t, at, all) => (Math.abs(t - time) < Math.abs(all[best] - time) ? at : best),
        0,
      );
    }
    this.tell();
  }

  // The numbers of the time under the pointer, else the newest.
  tell() {
    const { t } = this.history;
    const at = this.at !== null && this.at < t.length ? this.at : t.length - 1;
    const [from, to] = this.span;
    this.cursor.hidden = this.at === null;
    this.cursor.style.left = `${(100 * (t[at] - from)) / (to - from)}%`;
    setText(this.when, this.at === null ? "now" : `${clock(to - t[at])} ago`);
    const words = this.chart.lines.map(({ label }, line) => {
      const shown = withUnit(this.values[line][at], this.chart.unit);
      setText(this.numbers[line], shown);
      return `${label} ${shown}`;
    });
    if (this.at === null)
      setAttribute(this.drawing, "aria-label", `${this.chart.title}: ${words.join(", ")}`);
  }
}
