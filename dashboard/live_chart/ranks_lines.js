// The lines of some ranks over one another, and their mean: the same metric as the strips.

import { el, setAttribute, setText, svg } from "./dom.js";
import { isNumber, roundTicks, scaleFor, withUnit } from "./format.js";
import { bisect, linePoints } from "./lines.js";

const [LEFT, RIGHT, TOP, BOTTOM, HEIGHT] = [58, 6, 8, 18, 170];
const COLORS = Array.from({ length: 8 }, (_, i) => `gpu${i}`);

// Lines to draw as {name, label, color, xs, values}: the mean first, then the picked ranks.
export function rankLines(data, picked, mean) {
  const lines = [...picked].map((row, i) => ({
    row,
    label: `rank ${data.named.ranks[row][1]}`,
    color: COLORS[i % COLORS.length],
    ...data.line(row),
  }));
  return mean ? [{ row: null, label: "mean", color: "blue", ...data.meanLine() }, ...lines] : lines;
}

// The vertical axis as {low, high, ticks}, its ends round: around the values, from zero where that
// is near. The first steps, which are slow by nature, do not set it where there are many and they
// lie far above the others: then the last tick says that there are values beyond it.
export function lineRange(lines, unit) {
  const values = lines.flatMap((line) => line.values).sort((a, b) => a - b);
  const [low, most] = values.length ? [values[0], values.at(-1)] : [0, 1];
  const usual = values.length > 40 ? values[Math.floor(0.99 * (values.length - 1))] : most;
  const cut = most - low > 2 * (usual - low || Math.abs(usual));
  const high = cut ? usual : most;
  const from = low >= 0 && (low < 0.5 * high || low === high) ? 0 : low;
  const { unit: shown, factor } = scaleFor(unit, Math.max(Math.abs(from), Math.abs(high)));
  const to = high > from ? high : from < 0 ? 0 : 1;
  const ticks = roundTicks(from / factor, to / factor, 3).map(({ value, text }) => ({
    value: value * factor,
    text,
  }));
  const last = ticks.at(-1);
  last.text = `${most > last.value * (1 + 1e-9) && cut ? "≥" : ""}${last.text}${shown ? ` ${shown}` : ""}`;
  return { low: ticks[0].value, high: last.value, ticks };
}

// The value of a line at a place on the axis: that of the nearest column, null far from any.
export function lineValueAt({ xs, values }, x, near) {
  if (!xs.length) return null;
  const after = Math.min(bisect(xs, x), xs.length - 1);
  const at = after > 0 && x - xs[after - 1] < xs[after] - x ? after - 1 : after;
  return Math.abs(xs[at] - x) <= near ? values[at] : null;
}

export class RankLines {
  // `toggle(row)` is called when a line is pressed in the legend, null for the mean.
  constructor(toggle) {
    this.toggle = toggle;
    this.legend = el("div", { class: "ss-legend" });
    this.drawing = svg("svg", { class: "ss-rank-lines", role: "img" });
    this.hint = el("p", { class: "ss-muted ss-rank-hint" });
    this.node = el("div", { "data-testid": "rank-lines" }, this.legend, this.drawing, this.hint);
    this.x = null;
  }

  draw(data, metric, theme, picked, mean) {
    Object.assign(this, { data, metric, theme });
    this.lines = rankLines(data, picked, mean);
    this.build();
    const width = Math.max(100, this.drawing.clientWidth || this.node.clientWidth);
    const range = lineRange(this.lines, metric.unit);
    const x = (at) => LEFT + ((width - LEFT - RIGHT) * (at - data.begin)) / (data.end - data.begin);
    const y = (value) =>
      TOP + (HEIGHT - TOP - BOTTOM) * (1 - (value - range.low) / (range.high - range.low));
    Object.assign(this, { width, xOf: x });
    setAttribute(this.drawing, "viewBox", `0 0 ${width} ${HEIGHT}`);
    setAttribute(this.drawing, "height", HEIGHT);
    const names = this.lines.map(({ label }) => label).join(", ");
    setAttribute(
      this.drawing,
      "aria-label",
      `${metric.label} over ${data.axisName}: ${names || "no line"}`,
    );
    const clip = svg("clipPath", { id: "ss-rank-clip" });
    clip.append(
      svg("rect", {
        x: LEFT,
        y: TOP - 2, // a line along the edge keeps its width
        width: width - LEFT - RIGHT,
        height: HEIGHT - TOP - BOTTOM + 4,
      }),
    );
    const lines = svg("g", { "clip-path": "url(#ss-rank-clip)" });
    // The mean lies on top of the others.
    for (const line of [...this.lines].reverse())
      lines.append(
        svg("path", {
          d: pathOf(line, x, y),
          class: line.row === null ? "ss-rank-mean" : "ss-rank-line",
          style: `stroke:var(--ss-${line.color})`,
        }),
      );
    this.cross = svg("path", { class: "ss-rank-cross" });
    this.drawing.replaceChildren(clip, ...this.axes(range.ticks, x, y), lines, this.cross);
    this.point(this.x);
    setText(
      this.hint,
      this.lines.length ? "" : "Select ranks in the table, or click a heatmap row, to plot them.",
    );
  }

  build() {
    this.values = this.lines.map(() => el("span", { class: "ss-chip-value" }));
    this.legend.replaceChildren(
      ...this.lines.map(({ label, color, row }, i) =>
        el(
          "button",
          {
            type: "button",
            class: "ss-chip",
            title: "Remove line",
            onclick: () => this.toggle(row),
          },
          el("i", { style: `border-color:var(--ss-${color})` }),
          el("span", {}, label),
          this.values[i],
        ),
      ),
    );
  }

  axes(levels, x, y) {
    const made = [];
    for (const { value, text } of levels) {
      const at = y(value);
      made.push(svg("path", { d: `M${LEFT} ${at}H${this.width - RIGHT}`, class: "ss-rank-grid" }));
      const label = svg("text", { x: LEFT - 6, y: at + 3.5, "text-anchor": "end" });
      label.textContent = text;
      made.push(label);
    }
    const ticks = this.data.ticks(this.width);
    ticks.values.forEach((value, i) => {
      if (x(value) > this.width - 24) return;
      const anchor = x(value) < LEFT + 12 ? "start" : "middle";
      const label = svg("text", { x: x(value), y: HEIGHT - 5, "text-anchor": anchor });
      label.textContent = ticks.text[i];
      made.push(label);
    });
    return made;
  }

  // Shows the values at a place on the axis, the newest for null.
  point(x) {
    this.x = x;
    if (!this.lines) return;
    setAttribute(this.cross, "d", x === null ? "" : `M${this.xOf(x)} ${TOP}V${HEIGHT - BOTTOM}`);
    this.lines.forEach((line, i) => {
      const near = Math.max(2 * this.data.width, 3);
      const value = x === null ? line.values.at(-1) : lineValueAt(line, x, near);
      setText(this.values[i], isNumber(value) ? withUnit(value, this.metric.unit) : "");
      setAttribute(this.values[i], "title", x === null ? null : this.data.where(x));
    });
  }
}

function pathOf(line, x, y) {
  const points = linePoints(line.xs, line.values, null, 1, line.xs);
  let pen = "M";
  return points.x
    .map((at, i) => {
      if (points.y[i] === null) {
        pen = "M";
        return "";
      }
      const part = `${pen}${x(at).toFixed(1)} ${y(points.y[i]).toFixed(1)}`;
      pen = "L";
      return part;
    })
    .join("");
}
