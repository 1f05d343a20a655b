// The heatmap of many GPUs.

import { Card } from "./card.js";
import { el, setText } from "./dom.js";
import { scaleFor, suffix } from "./format.js";
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

// A row per GPU, or the lines of the GPU that is chosen in the list or by a click on its row.
export class HeatCard extends Card {
  build() {
    this.rows = this.spec.traces.filter((trace) => trace.axis === "y" && trace.style !== "context");
    super.build();
    const gpus = this.rows.map(({ gpu }) => el("option", { value: gpu }, `GPU ${gpu}`));
    const choose = ({ target }) => this.choose(target.value === "" ? null : Number(target.value));
    const list = { class: "ss-field", "aria-label": "GPU", onchange: choose };
    this.list = el("select", list, el("option", { value: "" }, "All GPUs"), ...gpus);
    this.tools.prepend(this.list);
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

  choose(gpu) {
    this.store.set("gpu", gpu);
    for (const card of this.scene.cards()) if (card instanceof HeatCard) this.scene.redraw(card);
  }

  figure() {
    this.list.value = this.gpu ?? "";
    const { data, layout } = super.figure();
    if (this.gpu !== null) return { data, layout };
    setText(this.unit, "");
    delete layout.yaxis2;
    const rows = { type: "category", autorange: "reversed", showgrid: false, showticklabels: true };
    Object.assign(layout, { yaxis: rows, hovermode: "closest", showlegend: false });
    layout.margin = { ...layout.margin, r: 64 }; // of the color bar
    return { data: [this.heat()], layout };
  }

  heat() {
    const { spec, store } = this;
    const most = spec.y.range?.[1] ?? this.top("y");
    const { unit, factor } = scaleFor(spec.y.unit, most);
    const color = this.scene.theme.palette[spec.heat];
    const cells = Math.max(1, Math.floor(this.plotWidth / MIN_CELL_PX));
    const [from, to] = store.range;
    const row = (trace) => {
      const series = this.source(trace);
      const values = this.column(trace)?.mean;
      if (!values) return new Array(cells).fill(null);
      const means = heatRow(xsOf(series, store.axis), values, store.range, cells, series.t);
      return means.map((mean) => (mean === null ? null : mean / factor));
    };
    return {
      ...{ type: "heatmap", ygap: 1, zmin: 0, zmax: (most || 1) / factor },
      x: Array.from({ length: cells + 1 }, (_, i) => from + ((to - from) * i) / cells),
      y: this.rows.map(({ gpu }) => String(gpu)),
      z: this.rows.map(row),
      colorscale: [
        [0, withAlpha(color, MIN_OPACITY)],
        [1, color],
      ],
      colorbar: { thickness: 8, outlinewidth: 0, nticks: 4, ticksuffix: suffix(unit) },
      hovertemplate: `GPU %{y}: %{z:.3~g}${suffix(unit)}<extra></extra>`,
    };
  }

  plotFirst(data, layout) {
    super.plotFirst(data, layout);
    this.plot.on("plotly_click", ({ points: [{ y }] }) => {
      if (this.gpu === null) this.choose(Number(y));
    });
  }
}
