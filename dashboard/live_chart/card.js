// One chart: a card with title, legend with values, Plotly's drawing, marks and crosshair.
//
// `scene` is what all cards share (painter.js); what the reader chooses goes into its store.

import { el, parts, say, setAttribute, setText } from "./dom.js";
import { changesOf, wordOf } from "./events.js";
import { MISSING, clock, isNumber, scaleFor, timeTicks, withUnit } from "./format.js";
import {
  bandPoints,
  bisect,
  ema,
  holds,
  linePoints,
  oddNow,
  oddSpans,
  oddWord,
  recorded,
  visibleSpan,
  xsOf,
} from "./lines.js";
import { markShapes } from "./marks.js";
import { coarsen, latest, latestEver } from "./series.js";
import { withAlpha } from "./theme.js";

const PLOT_HEIGHT = 188; // px
const SMALL_HEIGHT = 128;
const MARGIN = { l: 50, r: 14, t: 8, b: 22 };
const MARGIN_Y2 = 40;
const CONFIG = { displayModeBar: false, responsive: false, doubleClick: false, showTips: false };
const NEAR_MARK = 6; // px
const MAX_DOTS = 60; // above it dots melt into a band
const POINT_WIDTH = 3; // px, at least, from one point of a line to the next
const BAND_OPACITY = 0.13; // of the area between minimum and maximum

export class Card {
  constructor(spec, scene) {
    this.spec = spec;
    this.scene = scene;
    this.range = [0, 1];
    this.width = 0;
    this.dirty = true;
    this.visible = false;
    this.plotted = false;
    this.drawnAt = 0;
    this.height = spec.height ?? (spec.group === "custom" ? SMALL_HEIGHT : PLOT_HEIGHT);
    this.box = { ...MARGIN, r: spec.y2 ? MARGIN_Y2 : MARGIN.r };
    this.build();
  }

  build() {
    const { spec } = this;
    const card = parts(`<section class="ss-card" data-points="0">
      <header class="ss-card-head"><h3 class="ss-cut" ref="title"></h3>
        <span class="ss-muted ss-unit" ref="unit"></span>
        <div class="ss-tools" ref="tools"></div></header>
      <div class="ss-legend" ref="legend"></div>
      <p class="ss-note" ref="about"></p>
      <div class="ss-stage" ref="stage">
        <div class="ss-plot ss-skeleton" ref="plot"></div>
        <p class="ss-none" hidden ref="none"></p>
        <div class="ss-cross" hidden ref="cross"><span ref="crossLabel"></span></div>
        <div class="ss-tip" hidden ref="tip"></div>
      </div>
    </section>`);
    Object.assign(this, card);
    setText(this.title, spec.title);
    setAttribute(this.node, "aria-label", spec.title);
    setAttribute(this.node, "data-testid", `chart-${spec.id}`);
    say(this.about, spec.note);
    this.chips = spec.traces.map((trace) => this.chip(trace));
    this.legend.append(...this.chips.map((chip) => chip.node));
    this.tools.append(...this.buttons());
    this.stage.style.height = `${this.height}px`;
    this.stage.hidden = !spec.traces.length && spec.kind !== "fit";
    this.stage.addEventListener("pointermove", (event) => this.point(event));
    this.stage.addEventListener("pointerleave", () => this.scene.hover(null, this));
  }

  // Puts a node between the title and the chart's own tools.
  putInHead(node) {
    this.tools.before(node);
  }

  chip(trace) {
    const chip = parts(`<button type="button" class="ss-chip" title="Toggle series">
      <i ref="swatch"></i><span ref="label"></span><span class="ss-chip-value" ref="value"></span>
    </button>`);
    chip.swatch.className = `ss-${trace.dash}`;
    chip.swatch.style.borderColor = `var(--ss-${trace.color})`;
    setText(chip.label, trace.label);
    setAttribute(chip.node, "aria-pressed", !this.hidden(trace));
    chip.node.addEventListener("click", () => this.pick(trace));
    return { ...chip, trace };
  }

  // Its chip was pressed: shows or hides a line.
  pick(trace) {
    this.scene.store.toggleHidden(this.lineName(trace));
    const { node } = this.chips.find((chip) => chip.trace === trace);
    node.setAttribute("aria-pressed", !this.hidden(trace));
    this.scene.redraw(this);
  }

  toggle(name, label, title) {
    const { store } = this.scene;
    const node = el(
      "button",
      {
        type: "button",
        class: "ss-tool",
        title,
        "aria-pressed": Boolean(store.prefs[name]),
        onclick: () => {
          store.set(name, !store.prefs[name]);
          node.setAttribute("aria-pressed", store.prefs[name]);
          this.scene.redraw(this);
        },
      },
      label,
    );
    return node;
  }

  buttons() {
    const { spec, scene } = this;
    const tool = (label, title, act) =>
      el("button", { type: "button", class: "ss-tool ss-quiet", title, onclick: act }, label);
    const list = [
      tool("CSV", "Download visible points (CSV)", () => this.saveCsv()),
      tool("PNG", "Download chart (PNG)", () => this.savePng()),
    ];
    if (spec.loss) {
      const slider = el("input", {
        type: "range",
        min: 0,
        max: 0.99,
        step: 0.01,
        value: scene.store.prefs.smoothing,
        "aria-label": "Smoothing",
        title: "Smoothing: exponential moving average over the points drawn",
        oninput: () => {
          scene.store.set("smoothing", Number(slider.value));
          scene.redraw(this);
        },
      });
      list.push(slider, this.toggle("log", "log", "Logarithmic loss axis"));
    }
    if (spec.traces.some((trace) => trace.style === "context")) {
      const title = "Scale the axis to the dashed line or to the data";
      const full = this.toggle(`full-${spec.id}`, "full scale", title);
      full.dataset.full = "";
      list.push(full);
    }
    return list;
  }

  lineName(trace) {
    return `${this.spec.id}/${trace.label}`;
  }

  hidden(trace) {
    return this.scene.store.prefs.hidden.includes(this.lineName(trace));
  }

  // The traces that are drawn now.
  get lines() {
    return this.spec.traces;
  }

  column(trace) {
    return this.scene.store.source(trace.series)?.v[trace.metric];
  }

  place(x) {
    const [from, to] = this.range;
    return this.box.l + ((x - from) / (to - from)) * (this.width - this.box.l - this.box.r);
  }

  // --- drawing ---

  // The largest value to show on an axis; totals and limits count only at full scale, and the first
  // rows of a run not where they are warm-up.
  top(axis) {
    let top = 0;
    for (const trace of this.lines) {
      const outside = trace.style === "context" && !this.scene.store.prefs[`full-${this.spec.id}`];
      if (trace.axis !== axis || outside || this.hidden(trace)) continue;
      const series = this.scene.store.source(trace.series);
      const values = series?.v[trace.metric]?.max;
      if (!values) continue;
      const [from, to] = visibleSpan(xsOf(series, this.scene.store.axis), this.scene.store.range);
      const skipped = this.spec.warm_up || 0;
      for (let i = from; i < to; i += 1)
        if (values[i] > top && series.start[i] >= skipped) top = values[i];
    }
    return top;
  }

  traces(factors) {
    return this.lines.flatMap((trace) => {
      if (!holds(this.column(trace)) || this.hidden(trace)) return [];
      const { band, x, y } = this.points(trace, factors[trace.axis]);
      const color = this.scene.theme.palette[trace.color];
      const shared = { type: "scatter", name: trace.label, hoverinfo: "skip", yaxis: trace.axis };
      const dots = (trace.style === "points" && x.length <= MAX_DOTS) || x.length === 1;
      const area = {
        ...{ ...shared, ...band, mode: "lines", showlegend: false },
        ...{ fill: "toself", fillcolor: withAlpha(color, BAND_OPACITY), line: { width: 0 } },
      };
      const line = {
        ...{ ...shared, x, y, showlegend: true, mode: dots ? "lines+markers" : "lines" },
        ...{ marker: { size: 5, color }, line: { color, width: 1.5, dash: trace.dash } },
      };
      return band ? [area, line] : [line];
    });
  }

  // The line of one trace as {x, y}; and the `band` around it, where a point is of several values.
  points(trace, factor) {
    const { axis, range, prefs } = this.scene.store;
    const whole = trace.style === "points" || trace.style === "context";
    const smooth = trace.style === "ema" ? prefs.smoothing : 0;
    const series = whole ? this.scene.store.source(trace.series) : this.fitting(trace, smooth);
    const column = series.v[trace.metric];
    const xs = xsOf(series, axis);
    const times = trace.series === "steps" ? null : series.t; // steps lack a metric by nature, samples by trouble
    const values = trace.style === "peak" ? column.max : column.mean;
    const line = linePoints(xs, values, range, factor, times, column.odd);
    if (whole || (!smooth && series.bucket === 1)) return line;
    return { ...line, band: bandPoints(xs, column, range, factor, times) };
  }

  // A trace's series at no more points than can be told apart: a line that moves up and down from
  // pixel to pixel would be a solid block.
  fitting(trace, smooth) {
    const { axis, range } = this.scene.store;
    const series = this.scene.store.source(trace.series);
    const [from, to] = visibleSpan(xsOf(series, axis), range);
    const most = (this.width - this.box.l - this.box.r) / POINT_WIDTH;
    const size = 2 ** Math.max(0, Math.ceil(Math.log2((to - from) / most)));
    const column = this.column(trace);
    const mean = smooth ? ema(column.mean, smooth) : column.mean;
    const alone = { ...series, v: { [trace.metric]: { ...column, mean } } };
    return coarsen(alone, series.bucket * size);
  }

  yAxis(spec, top, factor) {
    const { theme, store } = this.scene;
    const log = this.spec.loss && store.prefs.log;
    const axis = {
      ...{ fixedrange: true, gridcolor: theme.grid, zeroline: false, ticklen: 0 },
      ...{ nticks: this.height < PLOT_HEIGHT ? 4 : 5, separatethousands: true },
      ...{ tickfont: { size: 11 }, tickformat: spec.unit === "1/s" ? "~s" : "" },
      ...{ exponentformat: "e", ticklabeloverflow: "allow", type: "linear" },
    };
    if (spec.range) return { ...axis, range: [spec.range[0], spec.range[1] * 1.03] };
    if (spec.zero) return { ...axis, range: [0, top > 0 ? (top / factor) * 1.08 : 1] };
    return { ...axis, autorange: true, ...(log ? { type: "log", dtick: "D2" } : {}) };
  }

  xAxis() {
    const { theme, store } = this.scene;
    const { axis, range } = store;
    const shared = {
      range: [...range], // Plotly writes into it while panning
      ...{ type: "linear", zeroline: false, showgrid: false, showline: true, ticks: "outside" },
      ...{ linecolor: theme.line, tickcolor: theme.line, ticklen: 3, tickfont: { size: 11 } },
      ticklabeloverflow: "hide past div",
    };
    if (axis === "step") return { ...shared, nticks: 7, tickformat: ",d" };
    const ticks = timeTicks(range[0], range[1], Math.max(3, Math.floor(this.width / 95)));
    return { ...shared, tickmode: "array", tickvals: ticks.values, ticktext: ticks.text };
  }

  // What the layouts of all charts have.
  frame(dragmode) {
    const { theme } = this.scene;
    return {
      ...{ width: this.width, height: this.height, margin: this.box, dragmode },
      ...{ showlegend: false, hovermode: false, font: { family: theme.font, color: theme.text } },
      ...{ paper_bgcolor: "rgba(0,0,0,0)", plot_bgcolor: "rgba(0,0,0,0)" },
    };
  }

  figure() {
    const { spec, scene } = this;
    const tops = { y: this.top("y"), y2: spec.y2 ? this.top("y2") : 0 };
    const scales = { y: scaleFor(spec.y.unit, tops.y), y2: scaleFor(spec.y2?.unit || "", tops.y2) };
    const factors = { y: scales.y.factor, y2: scales.y2.factor };
    const bare = (name) =>
      !this.lines.some((line) => line.axis === name && holds(this.column(line)));
    const units = Object.keys(scales).map((name) => (bare(name) ? "" : scales[name].unit));
    setText(this.unit, units.filter(Boolean).join(" · "));
    const layout = {
      ...this.frame("zoom"),
      ...{ xaxis: this.xAxis(), yaxis: this.yAxis(spec.y, tops.y, factors.y) },
    };
    if (spec.y2) {
      const right = { overlaying: "y", side: "right", showgrid: false };
      layout.yaxis2 = { ...this.yAxis(spec.y2, tops.y2, factors.y2), ...right };
    }
    // Without a value the numbers and their unit would be made up.
    for (const [name, axis] of Object.entries({ y: layout.yaxis, y2: layout.yaxis2 }))
      if (axis && bare(name)) Object.assign(axis, { showticklabels: false, showgrid: false });
    this.range = scene.store.range;
    const marks = scene.marks.filter(({ x }) => x >= this.range[0] && x <= this.range[1]);
    const place = (x) => this.place(x);
    const right = this.width - this.box.r;
    const spans = this.oddSpans().map((span) => ({
      ...span,
      from: Math.max(span.from, this.range[0]),
    }));
    Object.assign(layout, markShapes(marks, spans, place, right, scene.theme));
    return { data: this.traces(factors), layout };
  }

  draw() {
    const { Plotly } = this.scene;
    const { data, layout } = this.figure();
    this.dirty = false;
    this.drawnAt = performance.now();
    layout.datarevision = this.drawnAt;
    if (this.plotted) Plotly.react(this.plot, data, layout, CONFIG);
    else this.first(data, layout);
    const { mean = [] } = (this.lines.length && this.column(this.lines[0])) || {};
    setAttribute(this.node, "data-points", mean.filter((value) => value !== null).length);
    this.showHeld();
    this.overlay();
  }

  // Where lines that are shown have values that are no finite numbers.
  oddSpans() {
    return this.lines.flatMap((trace) => {
      const series = this.scene.store.source(trace.series);
      const column = this.column(trace);
      if (!column || this.hidden(trace)) return [];
      return oddSpans(xsOf(series, this.scene.store.axis), column, this.range);
    });
  }

  // Says why nothing is drawn, and hides the legend of lines that this run does not have.
  showHeld() {
    let some = this.spec.traces.length === 0;
    let odd = false;
    for (const { node, trace } of this.chips) {
      const column = this.column(trace);
      node.hidden = !this.lines.includes(trace) || (trace.optional && !recorded(column));
      some ||= holds(column);
      odd ||= recorded(column);
    }
    const empty = odd ? "Every value is NaN or infinite." : this.spec.empty || "No values yet.";
    say(this.none, some ? "" : empty);
  }

  first(data, layout) {
    this.plot.classList.remove("ss-skeleton");
    this.plotted = true;
    this.scene.Plotly.newPlot(this.plot, data, layout, CONFIG);
    this.plot.on("plotly_relayout", (change) => {
      const [from, to] = [change["xaxis.range[0]"], change["xaxis.range[1]"]];
      if (isNumber(from) && isNumber(to)) this.scene.store.zoomTo([from, to]);
    });
    this.plot.on("plotly_relayouting", (change) => {
      if (!isNumber(change["xaxis.range[0]"])) return;
      this.range = [change["xaxis.range[0]"], change["xaxis.range[1]"]];
      this.overlay();
    });
    this.plot.on("plotly_doubleclick", () => this.scene.store.zoomTo(null));
  }

  overlay() {
    this.hoverAt(this.scene.hoverX, this.scene.hoverCard === this);
  }

  // --- crosshair and values ---

  point(event) {
    const left = event.clientX - this.stage.getBoundingClientRect().left;
    const inside = this.plotted && left >= this.box.l && left <= this.width - this.box.r;
    const share = (left - this.box.l) / (this.width - this.box.l - this.box.r);
    this.scene.hover(inside ? this.range[0] + share * (this.range[1] - this.range[0]) : null, this);
  }

  hoverAt(x, source) {
    const shown = x !== null && x >= this.range[0] && x <= this.range[1];
    this.cross.hidden = !shown;
    this.tip.hidden = true;
    for (const chip of this.chips)
      setText(chip.value, this.valueText(chip.trace, shown ? x : null));
    if (!shown) return;
    const left = this.place(x);
    this.cross.style.transform = `translateX(${left.toFixed(1)}px)`;
    setText(
      this.crossLabel,
      source
        ? this.scene.store.axis === "time"
          ? clock(x)
          : Math.round(x).toLocaleString("en-US")
        : "",
    );
    if (source) this.showTip(left);
  }

  showTip(left) {
    const near = this.scene.marks
      .filter((mark) => Math.abs(this.place(mark.x) - left) <= NEAR_MARK)
      .slice(-4);
    if (!near.length) return;
    const lines = near.map(({ event }) => {
      const changes = changesOf(event, this.scene.store.layout.metrics);
      return el(
        "div",
        {},
        el("b", {}, wordOf(event)),
        ` ${[changes, event.text].filter(Boolean).join(". ")}`,
      );
    });
    this.tip.replaceChildren(...lines);
    this.tip.hidden = false;
    this.tip.classList.toggle("ss-tip-left", left > this.width / 2);
    this.tip.style.left = left > this.width / 2 ? "auto" : `${left + 8}px`;
    this.tip.style.right = left > this.width / 2 ? `${this.width - left + 8}px` : "auto";
  }

  // At the crosshair, else the newest.
  valueText(trace, x) {
    const series = this.scene.store.source(trace.series);
    const column = series?.v[trace.metric];
    if (!column) return MISSING;
    const unit = this.scene.store.layout.metrics[trace.metric]?.unit || "";
    const words = (value) => (typeof value === "string" ? value : withUnit(value, unit));
    if (x === null) {
      if (trace.style === "points") return words(latestEver(series, trace.metric));
      return oddNow(series, trace.metric) ?? words(latest(series, trace.metric));
    }
    const values = trace.style === "peak" ? column.max : column.mean;
    let at = Math.min(bisect(xsOf(series, this.scene.store.axis), x), column.mean.length - 1);
    const skips = trace.series === "steps"; // a row without this metric: the one before it counts
    while (skips && at > 0 && column.mean[at] === null && !column.odd[at]) at -= 1;
    return words(values[at] ?? (column.odd[at] ? oddWord(column.odd[at]) : null));
  }

  // --- export ---

  saveCsv() {
    const places = ["series", "metric", "unit", "first_row", "rows", "time_s", "step"];
    const rows = [[...places, "mean", "min", "max", "not_finite"]];
    for (const trace of this.spec.traces) {
      const series = this.scene.store.source(trace.series);
      const column = series?.v[trace.metric];
      if (!column) continue;
      const [from, to] = visibleSpan(xsOf(series, this.scene.store.axis), this.scene.store.range);
      const unit = this.scene.store.layout.metrics[trace.metric]?.unit || "";
      for (let i = from; i < to; i += 1) {
        const odd = column.odd[i];
        if (column.mean[i] === null && !odd) continue;
        const place = [series.start[i], series.bucket, series.t[i], series.s[i]];
        // A single row's value stands as it is, a bucket has how many were not finite.
        const { mean, min, max } = column;
        const whole = typeof odd === "string";
        const numbers = whole ? [odd, odd, odd, 1] : [mean[i], min[i], max[i], odd ?? 0];
        rows.push([trace.series, trace.metric, unit, ...place, ...numbers]);
      }
    }
    const blob = new Blob([rows.map((row) => row.join(",")).join("\n")], { type: "text/csv" });
    const url = URL.createObjectURL(blob);
    el("a", { href: url, download: `${this.fileName()}.csv` }).click();
    setTimeout(() => URL.revokeObjectURL(url), 1000);
  }

  fileName() {
    return `${this.scene.store.run}-${this.spec.id}`.replace(/[^\w.-]+/g, "-");
  }

  savePng() {
    if (!this.plotted) return;
    const { Plotly, theme } = this.scene;
    const { data, layout } = this.figure();
    const image = {
      ...{ ...layout, width: undefined, height: undefined, paper_bgcolor: theme.background },
      ...{ showlegend: true, margin: { ...this.box, l: 70, t: 60, b: 40 } },
      title: { text: `${this.spec.title} ${this.unit.textContent}` },
    };
    const size = { format: "png", width: 1200, height: 500, scale: 2 };
    Plotly.downloadImage({ data, layout: image }, { ...size, filename: this.fileName() });
  }

  close() {
    if (this.plotted) this.scene.Plotly.purge(this.plot);
    this.plotted = false;
  }
}
