// A chart of many GPUs: a row of heat for each over the shared horizontal axis. A click on a row, or
// on its name above, shows the lines of that GPU in all such charts.

import { Card } from "./card.js";
import { el, setAttribute, setText } from "./dom.js";
import { scaleFor, short } from "./format.js";
import { breaks, visibleSpan, xsOf } from "./lines.js";
import { withAlpha } from "./theme.js";

const CELL_WIDTH = 3; // px
const CLICK = 4; // px that the pointer may move in a click; more is a zoom

// Means of `values` in equal cells of the range, null where there are none. A value counts until
// the next one, as far as a line would go on between them.
export function heatRow(xs, values, range, cells, times) {
  const [sums, counts] = [new Array(cells).fill(0), new Array(cells).fill(0)];
  const [from, to] = visibleSpan(xs, range);
  const broken = breaks(times);
  const cellOf = (x) => Math.floor((cells * (x - range[0])) / (range[1] - range[0]));
  const row = () => sums.map((sum, cell) => (counts[cell] ? sum / counts[cell] : null));
  let held = -1;
  for (let i = from; i < to; i += 1) {
    if (values[i] === null) continue;
    const cell = Math.min(cellOf(xs[i]), xs[i] === range[1] ? cells - 1 : cells);
    const gap = held >= 0 && !broken(held, i) ? cellOf(xs[held]) + 1 : cell;
    for (let at = Math.max(0, gap); at < Math.min(cell, cells); at += 1) {
      sums[at] += values[held];
      counts[at] += 1;
    }
    if (cell >= 0 && cell < cells) {
      sums[cell] += values[i];
      counts[cell] += 1;
    }
    held = i;
  }
  return row();
}

export class HeatCard extends Card {
  build() {
    this.rows = this.spec.traces.filter((trace) => trace.axis === "y" && trace.style !== "context");
    super.build();
    this.low = el("span");
    this.high = el("span");
    this.ramp = el("i");
    this.scale = el("span", { class: "ss-scale" }, this.low, this.ramp, this.high);
    const all = { type: "button", class: "ss-tool", onclick: () => this.choose(null) };
    this.back = el("button", { ...all, "data-testid": "all-gpus" }, "All GPUs");
    this.unit.after(this.scale, this.back);
    this.stage.addEventListener("pointerdown", (event) => this.press(event));
  }

  // The GPU whose lines are drawn; null for the heat of all.
  get gpu() {
    return this.scene.store.prefs.gpu ?? null;
  }

  get lines() {
    const own = (trace) => (this.gpu === null ? this.rows.includes(trace) : trace.gpu === this.gpu);
    return this.spec.traces.filter((trace) => own(trace) || trace.style === "context");
  }

  hidden(trace) {
    return (this.gpu !== null || trace.style === "context") && super.hidden(trace);
  }

  choose(gpu) {
    this.scene.store.set("gpu", gpu);
    for (const card of this.scene.cards()) if (card instanceof HeatCard) this.scene.redraw(card);
  }

  // While heat is shown, a chip chooses its GPU.
  pick(trace) {
    if (this.gpu === null && this.rows.includes(trace)) this.choose(trace.gpu);
    else super.pick(trace);
  }

  press(down) {
    if (this.gpu !== null || !this.plotted) return;
    const { top } = this.stage.getBoundingClientRect();
    const share = (down.clientY - top - this.box.t) / (this.height - this.box.t - this.box.b);
    const row = this.rows[Math.floor(share * this.rows.length)];
    const release = (up) => {
      const moved = Math.hypot(up.clientX - down.clientX, up.clientY - down.clientY);
      if (row && moved <= CLICK) this.choose(row.gpu);
    };
    window.addEventListener("pointerup", release, { once: true });
  }

  figure() {
    const heat = this.gpu === null;
    this.scale.hidden = !heat;
    this.back.hidden = heat;
    this.node.classList.toggle("ss-heat", heat);
    for (const { node, label, trace } of this.chips.filter((chip) =>
      this.rows.includes(chip.trace),
    )) {
      const title = heat ? `Show the lines of GPU ${trace.gpu}` : "Toggle series";
      setAttribute(node, "title", title);
      setAttribute(node, "aria-pressed", heat ? null : !this.hidden(trace));
      setText(label, heat ? `GPU ${trace.gpu}` : trace.label);
    }
    const made = super.figure();
    if (!heat) return made;
    setText(this.unit, "");
    const yaxis = {
      ...made.layout.yaxis,
      ...{ type: "linear", autorange: false, range: [this.rows.length - 0.5, -0.5] },
      ...{ tickmode: "array", tickvals: this.rows.map((_, i) => i), showgrid: false },
      ...{ ticktext: this.rows.map((trace) => String(trace.gpu)), showticklabels: true },
    };
    const { yaxis2: _, ...layout } = made.layout;
    return { data: [this.heat()], layout: { ...layout, yaxis } };
  }

  heat() {
    const { store, theme } = this.scene;
    const { spec } = this;
    const most = spec.y.range?.[1] ?? this.top("y");
    const { unit, factor } = scaleFor(spec.y.unit, most);
    const color = theme.palette[this.spec.heat];
    const ends = [withAlpha(color, 0.06), color];
    setText(this.low, "0");
    setText(this.high, `${short(most / factor)} ${unit}`);
    this.ramp.style.background = `linear-gradient(to right, ${ends.join()})`;
    const cells = Math.max(1, Math.floor((this.width - this.box.l - this.box.r) / CELL_WIDTH));
    const [from, to] = store.range;
    const z = this.rows.map((trace) => {
      const series = store.source(trace.series);
      const column = this.column(trace);
      if (!column) return new Array(cells).fill(null);
      return heatRow(xsOf(series, store.axis), column.mean, store.range, cells, series.t);
    });
    return {
      type: "heatmap",
      z,
      x: Array.from({ length: cells + 1 }, (_, i) => from + ((to - from) * i) / cells),
      y: this.rows.map((_, i) => i),
      ...{ zmin: 0, zmax: most || 1, colorscale: ends.map((end, i) => [i, end]) },
      ...{ showscale: false, hoverinfo: "skip", ygap: 1, zsmooth: false },
    };
  }
}
