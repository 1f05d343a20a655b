// The heatmap of many GPUs.

import { Card } from "./card.js";
import { button, el, setAttribute, setText } from "./dom.js";
import { scaleFor, short, suffix } from "./format.js";
import { breaks, visibleSpan, xsOf } from "./series.js";
import { withAlpha } from "./theme.js";

const MIN_CELL_PX = 3;
const MIN_OPACITY = 0.07; // of the color of the lowest value

// Means of `values` in equal cells of the range; a value holds as far as a line would bridge the gap.
export function heatRow(xs, values, range, cells, times) {
  const [sums, counts] = [new Array(cells).fill(0), new Array(cells).fill(0)];
  const [from, to] = visibleSpan(xs, range);
  const broken = breaks(times);
  const cellOf = (x) => Math.floor((cells * (x - range[0])) / (range[1] - range[0]));
  const add = (cell, value) => {
    sums[cell] += value;
    counts[cell] += 1;
  };
  let held = -1;
  for (let i = from; i < to; i += 1) {
    if (values[i] === null) continue;
    const cell = Math.min(cellOf(xs[i]), xs[i] === range[1] ? cells - 1 : cells);
    const gap = held >= 0 && !broken(held, i) ? cellOf(xs[held]) + 1 : cell;
    for (let at = Math.max(0, gap); at < Math.min(cell, cells); at += 1) add(at, values[held]);
    if (cell >= 0 && cell < cells) add(cell, values[i]);
    held = i;
  }
  return sums.map((total, cell) => (counts[cell] ? total / counts[cell] : null));
}

export const heatColors = (color) => [withAlpha(color, MIN_OPACITY), color];

// Returns a heatmap for Plotly with at most `most` cells per row; `rows` are {xs, values, times}.
export function heatTrace(rows, range, most, [low, high], color) {
  const cells = Math.max(1, Math.floor(most));
  const [from, to] = range;
  return {
    ...{ type: "heatmap", ygap: 1, zmin: low, zmax: high },
    x: Array.from({ length: cells + 1 }, (_, i) => from + ((to - from) * i) / cells),
    y: rows.map((_, i) => i),
    z: rows.map(({ xs, values, times }) => heatRow(xs, values, range, cells, times)),
    colorscale: heatColors(color).map((end, i) => [i, end]),
  };
}

export const maxCells = (width) => width / MIN_CELL_PX;

// A row per GPU, or the lines of the GPU whose chip is pressed.
export class HeatCard extends Card {
  build() {
    this.rows = this.spec.traces.filter((trace) => trace.axis === "y" && trace.style !== "context");
    super.build();
    [this.low, this.high, this.ramp] = [el("span"), el("span"), el("i")];
    this.scale = el("span", { class: "ss-muted ss-scale" }, this.low, this.ramp, this.high);
    const all = { class: "ss-tool", "data-testid": "all-gpus" };
    this.back = button(() => this.choose(null), all, "All GPUs");
    this.unit.after(this.scale, this.back);
  }

  // The GPU whose lines are drawn; null for the heatmap.
  get gpu() {
    return this.store.prefs.gpu ?? null;
  }

  get lines() {
    const drawn = (trace) =>
      this.gpu === null ? this.rows.includes(trace) : trace.gpu === this.gpu;
    return this.spec.traces.filter((trace) => drawn(trace) || trace.style === "context");
  }

  hidden(trace) {
    return (this.gpu !== null || trace.style === "context") && super.hidden(trace);
  }

  choose(gpu) {
    this.store.set("gpu", gpu);
    for (const card of this.scene.cards()) if (card instanceof HeatCard) this.scene.redraw(card);
  }

  pick(trace) {
    if (this.gpu === null && this.rows.includes(trace)) this.choose(trace.gpu);
    else super.pick(trace);
  }

  figure() {
    const heat = this.gpu === null;
    this.scale.hidden = !heat;
    this.back.hidden = heat;
    this.node.classList.toggle("ss-heat", heat);
    for (const { node, label, trace } of this.chips) {
      if (!this.rows.includes(trace)) continue;
      const title = heat ? `Show the lines of GPU ${trace.gpu}` : "Toggle series";
      setAttribute(node, "title", title);
      setAttribute(node, "aria-pressed", heat ? null : !this.hidden(trace));
      setText(label, heat ? `GPU ${trace.gpu}` : trace.label);
    }
    const { data, layout } = super.figure();
    if (!heat) return { data, layout };
    setText(this.unit, "");
    delete layout.yaxis2;
    Object.assign(layout.yaxis, {
      ...{ type: "linear", autorange: false, range: [this.rows.length - 0.5, -0.5] },
      ...{ tickmode: "array", tickvals: this.rows.map((_, i) => i), showgrid: false },
      ...{ ticktext: this.rows.map((trace) => String(trace.gpu)), showticklabels: true },
    });
    return { data: [this.heat()], layout };
  }

  heat() {
    const { spec, store } = this;
    const most = spec.y.range?.[1] ?? this.top("y");
    const { unit, factor } = scaleFor(spec.y.unit, most);
    const color = this.scene.theme.palette[spec.heat];
    setText(this.low, "0");
    setText(this.high, short(most / factor) + suffix(unit));
    this.ramp.style.background = `linear-gradient(to right, ${heatColors(color).join()})`;
    const rows = this.rows.map((trace) => {
      const series = this.source(trace);
      const values = this.column(trace)?.mean;
      if (!values) return { xs: [], values: [], times: null };
      return { xs: xsOf(series, store.axis), values, times: series.t };
    });
    const trace = heatTrace(rows, store.range, maxCells(this.plotWidth), [0, most || 1], color);
    return { ...trace, showscale: false, hoverinfo: "skip" };
  }
}
