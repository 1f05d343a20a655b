// One chart: a card with title, tools, legend with values, Plotly's drawing, marks and crosshair.
// `scene` is the painter, with everything that the cards share.

import { button, el, parts, setAttribute, setText, showText } from "./dom.js";
import { changesOf, markShapes, nameOf, textOf } from "./events.js";
import { MISSING, clock, counted, isNumber, scaleFor, timeTicks, withUnit } from "./format.js";
import {
  bandPoints,
  bisect,
  ema,
  holds,
  latest,
  latestEver,
  linePoints,
  oddNow,
  oddSpans,
  oddWord,
  recorded,
  thinned,
  visibleSpan,
  xsOf,
} from "./series.js";
import { withAlpha } from "./theme.js";

const PLOT_HEIGHT_PX = 188;
const SMALL_HEIGHT_PX = 128;
const MARGIN = { l: 50, r: 14, t: 8, b: 22 };
const MARGIN_Y2_PX = 40;
const CONFIG = { displayModeBar: false, responsive: false, doubleClick: false, showTips: false };
const MAX_MARK_DISTANCE_PX = 6; // from the pointer to a mark with a tooltip
const MAX_MARKS_IN_TOOLTIP = 4;
const MAX_DOTS = 60; // more dots would become a band
const MIN_POINT_PX = 3; // narrower points of a noisy line would be a solid block
const BAND_OPACITY = 0.13; // of the area between minimum and maximum
const DASHES = { solid: "solid", dash: "dashed", dot: "dotted" }; // Plotly's words in CSS
const KEY_STEP = 0.01; // of the range, per press of an arrow key

export class Card {
  constructor(spec, scene) {
    Object.assign(this, { spec, scene, range: [0, 1], width: 0, drawnAt: 0 });
    Object.assign(this, { dirty: true, visible: false, plotted: false });
    this.height = spec.height ?? (spec.group === "custom" ? SMALL_HEIGHT_PX : PLOT_HEIGHT_PX);
    this.box = { ...MARGIN, r: spec.y2 ? MARGIN_Y2_PX : MARGIN.r };
    this.build();
  }

  build() {
    const { spec } = this;
    const card = parts(`<section class="ss-box ss-card" data-points="0">
      <header class="ss-head"><h3 class="ss-cut" ref="title"></h3>
        <span class="ss-muted" ref="unit"></span>
        <div class="ss-tools ss-end" ref="tools"></div></header>
      <div class="ss-legend" ref="legend"></div>
      <p class="ss-muted ss-note" ref="about"></p>
      <div class="ss-stage" tabindex="0" role="application" aria-roledescription="chart"
        ref="stage">
        <div class="ss-plot ss-skeleton" ref="plot"></div>
        <p class="ss-muted ss-none" hidden ref="none"></p>
        <div class="ss-cross" hidden ref="cross"><span ref="crossLabel"></span></div>
        <div class="ss-tip ss-float" hidden ref="tip"></div>
      </div>
    </section>`);
    Object.assign(this, card);
    setText(this.title, spec.title);
    setAttribute(this.node, "aria-label", spec.title);
    setAttribute(this.node, "data-testid", `chart-${spec.id}`);
    showText(this.about, spec.note);
    this.chips = spec.traces.map((trace) => this.chip(trace));
    this.legend.append(...this.chips.map((chip) => chip.node));
    this.tools.append(...this.buttons());
    this.stage.style.height = `${this.height}px`;
    setAttribute(this.stage, "aria-label", `${spec.title}. Arrow keys read values.`);
    this.stage.addEventListener("pointermove", (event) => this.point(event));
    this.stage.addEventListener("keydown", (event) => this.press(event));
    for (const leave of ["pointerleave", "blur"])
      this.stage.addEventListener(leave, () => this.scene.hover(null, this));
  }

  get store() {
    return this.scene.store;
  }

  chip(trace) {
    const chip = parts(`<button type="button" class="ss-chip" title="Toggle series">
      <i ref="swatch"></i><span ref="label"></span><span class="ss-muted" ref="value"></span>
    </button>`);
    chip.swatch.style.borderTop = `2px ${DASHES[trace.dash]} var(--ss-${trace.color})`;
    setText(chip.label, trace.label);
    setAttribute(chip.node, "aria-pressed", !this.hidden(trace));
    chip.node.addEventListener("click", () => this.pick(trace));
    return { ...chip, trace };
  }

  pick(trace) {
    this.store.toggleHidden(this.lineName(trace));
    const { node } = this.chips.find((chip) => chip.trace === trace);
    setAttribute(node, "aria-pressed", !this.hidden(trace));
    this.scene.redraw(this);
  }

  toggle(name, label, title) {
    const { prefs } = this.store;
    const change = () => {
      this.store.set(name, !prefs[name]);
      setAttribute(node, "aria-pressed", prefs[name]);
      this.scene.redraw(this);
    };
    const attributes = { class: "ss-tool", title, "aria-pressed": Boolean(prefs[name]) };
    const node = button(change, attributes, label);
    return node;
  }

  buttons() {
    const { spec, scene } = this;
    const list = ["png", "svg"].map((format) => {
      const name = format.toUpperCase();
      const quiet = { class: "ss-tool ss-quiet", title: `Download chart (${name})` };
      return button(() => this.saveImage(format), quiet, name);
    });
    if (spec.loss) {
      const slider = el("input", {
        ...{ type: "range", min: 0, max: 0.99, step: 0.01, value: this.store.prefs.smoothing },
        "aria-label": "Smoothing",
        title: "Smoothing: exponential moving average over the points drawn",
        oninput: () => {
          this.store.set("smoothing", Number(slider.value));
          scene.redraw(this);
        },
      });
      list.push(slider, this.toggle("log", "log", "Logarithmic loss axis"));
    }
    if (spec.traces.some((trace) => trace.style === "context")) {
      const title = "Scale the axis to the dashed line or to the data";
      this.full = this.toggle(`full-${spec.id}`, "full scale", title);
      list.push(this.full);
    }
    return list;
  }

  lineName(trace) {
    return `${this.spec.id}/${trace.label}`;
  }

  hidden(trace) {
    return this.store.prefs.hidden.includes(this.lineName(trace));
  }

  get lines() {
    return this.spec.traces;
  }

  source(trace) {
    return this.store.source(trace.series);
  }

  column(trace) {
    return this.source(trace)?.v[trace.metric];
  }

  span(series) {
    return visibleSpan(xsOf(series, this.store.axis), this.store.range);
  }

  get plotWidth() {
    return this.width - this.box.l - this.box.r;
  }

  place(x) {
    const [from, to] = this.range;
    return this.box.l + ((x - from) / (to - from)) * this.plotWidth;
  }

  // The largest value to show on an axis: totals and limits only at full scale, warm-up never.
  top(axis) {
    const { spec, store } = this;
    const full = store.prefs[`full-${spec.id}`];
    let top = 0;
    for (const trace of this.lines) {
      const values = this.column(trace)?.max;
      const outside = trace.style === "context" && !full;
      if (!values || trace.axis !== axis || outside || this.hidden(trace)) continue;
      const series = this.source(trace);
      const [from, to] = this.span(series);
      for (let i = from; i < to; i += 1)
        if (values[i] > top && series.start[i] >= (spec.warm_up || 0)) top = values[i];
    }
    return top;
  }

  traces(factors) {
    return this.lines.flatMap((trace) => this.drawn(trace, factors[trace.axis]));
  }

  // Returns the line of a trace for Plotly, after its band; none if the trace is hidden or empty.
  drawn(trace, factor) {
    if (!holds(this.column(trace)) || this.hidden(trace)) return [];
    const { band, x, y } = this.points(trace, factor);
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
  }

  // Returns the line of a trace as {x, y}, with a `band` if its points have several values.
  points(trace, factor) {
    const { axis, range, prefs } = this.store;
    const whole = trace.style === "points" || trace.style === "context";
    const smooth = trace.style === "ema" ? prefs.smoothing : 0;
    const series = whole ? this.source(trace) : this.fitting(trace, smooth);
    const column = series.v[trace.metric];
    const xs = xsOf(series, axis);
    const times = trace.series === "steps" ? null : series.t; // steps may lack a metric without a gap
    const values = trace.style === "peak" ? column.max : column.mean;
    const line = linePoints(xs, values, range, factor, times, column.odd);
    if (whole || (!smooth && series.bucket === 1)) return line;
    return { ...line, band: bandPoints(xs, column, range, factor, times) };
  }

  // Returns a trace's series with as many points as fit into the plot.
  fitting(trace, smooth) {
    const { axis, range } = this.store;
    const column = this.column(trace);
    const mean = smooth ? ema(column.mean, smooth) : column.mean;
    const alone = { ...this.source(trace), v: { [trace.metric]: { ...column, mean } } };
    return thinned(alone, axis, range, this.plotWidth / MIN_POINT_PX);
  }

  yAxis(spec, top, factor) {
    const log = this.spec.loss && this.store.prefs.log;
    const axis = {
      ...{ nticks: this.height < PLOT_HEIGHT_PX ? 4 : 5, separatethousands: true, ticklen: 0 },
      ...{ tickformat: spec.unit === "1/s" ? "~s" : "", exponentformat: "e" },
      ...{ ticklabeloverflow: "allow", type: "linear" },
    };
    if (spec.range) return { ...axis, range: [spec.range[0], spec.range[1] * 1.03] };
    if (spec.zero) return { ...axis, range: [0, top > 0 ? (top / factor) * 1.08 : 1] };
    return { ...axis, autorange: true, ...(log ? { type: "log", dtick: "D2" } : {}) };
  }

  xAxis() {
    const { axis, range } = this.store;
    const { line } = this.scene.theme;
    const shared = {
      range: [...range], // Plotly writes into it while panning
      ...{ type: "linear", fixedrange: false, showgrid: false, showline: true, ticks: "outside" },
      ...{ linecolor: line, tickcolor: line, ticklen: 3, ticklabeloverflow: "hide past div" },
    };
    if (axis === "step") {
      const few = range[1] - range[0] < 7; // otherwise ticks of half steps repeat their labels
      return { ...shared, ...(few ? { dtick: 1 } : { nticks: 7 }), tickformat: ",d" };
    }
    const ticks = timeTicks(range[0], range[1], Math.max(3, Math.floor(this.width / 95)));
    return { ...shared, tickmode: "array", tickvals: ticks.values, ticktext: ticks.text };
  }

  figure() {
    const { spec, scene, width, height, box: margin } = this;
    const layout = {
      ...{ template: scene.theme.template, width, height, margin, xaxis: this.xAxis() },
      ...{ dragmode: "zoom", showlegend: false, hovermode: false },
    };
    const [factors, units] = [{}, []];
    for (const [name, key] of Object.entries({ y: "yaxis", y2: "yaxis2" })) {
      if (!spec[name]) continue;
      const top = this.top(name);
      const { unit, factor } = scaleFor(spec[name].unit, top);
      factors[name] = factor;
      layout[key] = this.yAxis(spec[name], top, factor);
      // An axis without a value has neither numbers nor a unit.
      if (this.lines.some((line) => line.axis === name && holds(this.column(line))))
        units.push(unit);
      else Object.assign(layout[key], { showticklabels: false, showgrid: false });
    }
    if (spec.y2) {
      // Plotly's default, ticks at the places of the left axis, has values such as 36.44.
      const right = { overlaying: "y", side: "right", showgrid: false, tickmode: "auto" };
      Object.assign(layout.yaxis2, right);
    }
    setText(this.unit, units.filter(Boolean).join(" · "));
    this.range = this.store.range;
    const [from, to] = this.range;
    const marks = scene.marks.filter(({ x }) => x >= from && x <= to);
    const spans = this.oddSpans().map((span) => ({ ...span, from: Math.max(span.from, from) }));
    const place = (x) => this.place(x);
    Object.assign(layout, markShapes(marks, spans, place, this.width - this.box.r, scene.theme));
    return { data: this.traces(factors), layout };
  }

  draw() {
    const { data, layout } = this.figure();
    this.dirty = false;
    this.drawnAt = performance.now();
    layout.datarevision = this.drawnAt;
    if (this.plotted) this.scene.Plotly.react(this.plot, data, layout, CONFIG);
    else this.plotFirst(data, layout);
    const { mean = [] } = (this.lines.length && this.column(this.lines[0])) || {};
    setAttribute(this.node, "data-points", mean.filter((value) => value !== null).length);
    this.showHeld();
    this.overlay();
  }

  oddSpans() {
    return this.lines.flatMap((trace) => {
      const column = this.column(trace);
      if (!column || this.hidden(trace)) return [];
      return oddSpans(xsOf(this.source(trace), this.store.axis), column, this.range);
    });
  }

  // Shows why nothing is drawn. Hides chips of lines that this run does not have.
  showHeld() {
    const columns = this.spec.traces.map((trace) => this.column(trace));
    this.chips.forEach(({ node, trace }, i) => {
      node.hidden = !this.lines.includes(trace) || (trace.optional && !recorded(columns[i]));
    });
    const empty = this.spec.empty || "No values yet.";
    const reason = columns.some(recorded) ? "Every value is NaN or infinite." : empty;
    showText(this.none, columns.some(holds) ? "" : reason);
  }

  plotFirst(data, layout) {
    this.plot.classList.remove("ss-skeleton");
    this.plotted = true;
    this.scene.Plotly.newPlot(this.plot, data, layout, CONFIG);
    const changed = (change, show) => {
      const range = [change["xaxis.range[0]"], change["xaxis.range[1]"]];
      if (range.every(isNumber)) show(range);
    };
    this.plot.on("plotly_relayout", (change) =>
      changed(change, (range) => this.store.zoomTo(range)),
    );
    this.plot.on("plotly_relayouting", (change) =>
      changed(change, (range) => {
        this.range = range;
        this.overlay();
      }),
    );
    this.plot.on("plotly_doubleclick", () => this.store.zoomTo(null));
  }

  overlay() {
    this.hoverAt(this.scene.hoverX, this.scene.hoverCard === this);
  }

  point(event) {
    const left = event.clientX - this.stage.getBoundingClientRect().left - this.box.l;
    const [from, to] = this.range;
    const inside = this.plotted && left >= 0 && left <= this.plotWidth;
    this.scene.hover(inside ? from + (left / this.plotWidth) * (to - from) : null, this);
  }

  // Moves the crosshair by arrow keys, from the newest value on.
  press(event) {
    const steps = { ArrowLeft: -1, ArrowRight: 1 }[event.key];
    if (!steps || !this.plotted) return;
    event.preventDefault();
    const [from, to] = this.range;
    const x = (this.scene.hoverX ?? to) + steps * KEY_STEP * (to - from);
    this.scene.hover(Math.max(from, Math.min(to, x)), this);
  }

  // Shows the values at x; `own` is true in the card with the pointer.
  hoverAt(x, own) {
    const shown = x !== null && x >= this.range[0] && x <= this.range[1];
    this.cross.hidden = !shown;
    this.tip.hidden = true;
    for (const { value, trace } of this.chips)
      setText(value, this.valueText(trace, shown ? x : null));
    if (!shown) return;
    const left = this.place(x);
    this.cross.style.transform = `translateX(${left.toFixed(1)}px)`;
    const where = this.store.axis === "time" ? clock(x) : counted(Math.round(x));
    setText(this.crossLabel, own ? where : "");
    if (own) this.showTip(left);
  }

  showTip(left) {
    const near = this.scene.marks
      .filter((mark) => Math.abs(this.place(mark.x) - left) <= MAX_MARK_DISTANCE_PX)
      .slice(-MAX_MARKS_IN_TOOLTIP);
    const lines = near.map(({ event }) => {
      const changes = changesOf(event, this.store.layout.metrics);
      const text = ` ${[changes, textOf(event)].filter(Boolean).join(". ")}`;
      return el("div", {}, el("b", {}, nameOf(event)), text);
    });
    this.tip.replaceChildren(...lines);
    this.tip.hidden = !near.length;
    const right = left > this.width / 2;
    this.tip.style.left = right ? "auto" : `${left + 8}px`;
    this.tip.style.right = right ? `${this.width - left + 8}px` : "auto";
  }

  // The value at x, for null the newest value.
  valueText(trace, x) {
    const series = this.source(trace);
    const column = series?.v[trace.metric];
    if (!column) return MISSING;
    const unit = this.store.layout.metrics[trace.metric]?.unit || "";
    const text = (value) => (typeof value === "string" ? value : withUnit(value, unit));
    if (x === null) {
      if (trace.style === "points") return text(latestEver(series, trace.metric));
      return oddNow(series, trace.metric) ?? text(latest(series, trace.metric));
    }
    const values = trace.style === "peak" ? column.max : column.mean;
    let at = Math.min(bisect(xsOf(series, this.store.axis), x), values.length - 1);
    const skips = trace.series === "steps"; // a step without the metric has that of the step before
    while (skips && at > 0 && column.mean[at] === null && !column.odd[at]) at -= 1;
    return text(values[at] ?? (column.odd[at] ? oddWord(column.odd[at]) : null));
  }

  saveImage(format) {
    if (!this.plotted) return;
    const { Plotly, theme } = this.scene;
    const { data, layout } = this.figure();
    const image = {
      ...{ ...layout, width: undefined, height: undefined, paper_bgcolor: theme.background },
      ...{ showlegend: true, margin: { ...this.box, l: 70, t: 60, b: 40 } },
      title: { text: `${this.spec.title} ${this.unit.textContent}` },
    };
    const filename = `${this.store.run}-${this.spec.id}`.replace(/[^\w.-]+/g, "-");
    const file = { format, width: 1200, height: 500, scale: 2, filename };
    Plotly.downloadImage({ data, layout: image }, file);
  }

  close() {
    if (this.plotted) this.scene.Plotly.purge(this.plot);
    this.plotted = false;
  }
}
