// One chart: a card with title, tools and Plotly's drawing, with its legend, hover and modebar.
// `scene` is the painter, with everything that the cards share.

import { button, el, parts, setAttribute, setText, showText } from "./dom.js";
import { markShapes } from "./events.js";
import { isNumber, plain, scaleFor, suffix, timeTicks, withUnit } from "./format.js";
import {
  bandPoints,
  ema,
  holds,
  latest,
  latestEver,
  linePoints,
  oddNow,
  oddSpans,
  recorded,
  thinned,
  visibleSpan,
  xsOf,
} from "./series.js";
import { withAlpha } from "./theme.js";

const PLOT_HEIGHT_PX = 212;
const SMALL_HEIGHT_PX = 152;
const MARGIN = { l: 50, r: 14, t: 26, b: 22 };
const MARGIN_Y2_PX = 40;
const LEGEND_ROW_PX = 19;
const LEGEND_ENTRY_PX = 168; // constant: a new value moves nothing
const MAX_DOTS = 60; // more dots would become a band
const MIN_POINT_PX = 3; // narrower points of a noisy line would be a solid block
const BAND_OPACITY = 0.13; // of the area between minimum and maximum
const KEY_STEP = 0.01; // of the range, per press of an arrow key

export class Card {
  constructor(spec, scene) {
    Object.assign(this, { spec, scene, width: 0, drawnAt: 0 });
    Object.assign(this, { dirty: true, visible: false, plotted: false, keyX: null });
    this.height = spec.group === "custom" ? SMALL_HEIGHT_PX : PLOT_HEIGHT_PX;
    this.box = { ...MARGIN, r: spec.y2 ? MARGIN_Y2_PX : MARGIN.r };
    this.build();
  }

  build() {
    const { spec } = this;
    const card = parts(`<section class="ss-box ss-card" data-points="0">
      <header class="ss-head"><h3 class="ss-cut" ref="title"></h3>
        <span class="ss-muted" ref="unit"></span>
        <div class="ss-tools ss-end" ref="tools"></div></header>
      <p class="ss-muted ss-note" ref="about"></p>
      <div class="ss-stage ss-skeleton" tabindex="0" role="application"
        aria-roledescription="chart" ref="stage"><div ref="plot"></div>
        <p class="ss-muted ss-none" hidden ref="none"></p>
      </div>
    </section>`);
    Object.assign(this, card);
    setText(this.title, spec.title);
    setAttribute(this.node, "aria-label", spec.title);
    setAttribute(this.node, "data-testid", `chart-${spec.id}`);
    showText(this.about, spec.note);
    this.tools.append(...this.buttons());
    setAttribute(this.stage, "aria-label", `${spec.title}. Arrow keys read values.`);
    this.stage.addEventListener("keydown", (event) => this.press(event));
    this.stage.addEventListener("blur", () => this.readAt(null));
  }

  get store() {
    return this.scene.store;
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
    const list = [];
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
      list.push(this.toggle(`full-${spec.id}`, "full scale", title));
    }
    return list;
  }

  lineName(trace) {
    return `${this.spec.id}/${trace.label}`;
  }

  hidden(trace) {
    return this.store.prefs.hidden.includes(this.lineName(trace));
  }

  source(trace) {
    return this.store.source(trace.series);
  }

  column(trace) {
    return this.source(trace)?.v[trace.metric];
  }

  get plotWidth() {
    return this.width - this.box.l - this.box.r;
  }

  // The largest value to show on an axis: totals and limits only at full scale, warm-up never.
  top(axis) {
    const { spec, store } = this;
    const full = store.prefs[`full-${spec.id}`];
    let top = 0;
    for (const trace of this.spec.traces) {
      const values = this.column(trace)?.max;
      const outside = trace.style === "context" && !full;
      if (!values || trace.axis !== axis || outside || this.hidden(trace)) continue;
      const series = this.source(trace);
      const [from, to] = visibleSpan(xsOf(series, store.axis), store.range);
      for (let i = from; i < to; i += 1)
        if (values[i] > top && series.start[i] >= (spec.warm_up || 0)) top = values[i];
    }
    return top;
  }

  // Returns the line of a trace for Plotly, after its band. A hidden one, or one without a value here,
  // has its legend entry only.
  drawn(trace, { unit, factor }) {
    const [held, hidden] = [holds(this.column(trace)), this.hidden(trace)];
    if (!held && trace.optional) return [];
    const color = this.scene.theme.palette[trace.color];
    const label = plain(trace.label);
    const name = `${label} ${this.newest(trace)}`;
    const shared = { type: "scatter", name, meta: trace.label, yaxis: trace.axis };
    const style = { color, width: 1.5, dash: trace.dash };
    const entry = { ...shared, x: [null], y: [null], mode: "lines", line: style };
    if (hidden || !held) return [{ ...entry, visible: hidden ? "legendonly" : true }];
    const { band, x, y } = this.points(trace, factor);
    const dots = (trace.style === "points" && x.length <= MAX_DOTS) || x.length === 1;
    const area = {
      ...{ ...shared, ...band, mode: "lines", showlegend: false, hoverinfo: "skip" },
      ...{ fill: "toself", fillcolor: withAlpha(color, BAND_OPACITY), line: { width: 0 } },
    };
    const line = {
      ...{ ...shared, x, y, mode: dots ? "lines+markers" : "lines", line: style },
      ...{ marker: { size: 5, color } },
      hovertemplate: `${label} %{y:.4~g}${suffix(unit)}<extra></extra>`,
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

  // Returns the newest value of a trace as text.
  newest(trace) {
    const series = this.source(trace);
    const unit = this.store.layout.metrics[trace.metric]?.unit || "";
    const value =
      trace.style === "points"
        ? latestEver(series, trace.metric)
        : (oddNow(series, trace.metric) ?? latest(series, trace.metric));
    return typeof value === "string" ? value : withUnit(value, unit);
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
      unifiedhovertitle: { text: axis === "step" ? "step %{x:,.0f}" : "%{x:,.1f} s" },
    };
    if (axis === "step") {
      const few = range[1] - range[0] < 7; // otherwise ticks of half steps repeat their labels
      return { ...shared, ...(few ? { dtick: 1 } : { nticks: 7 }), tickformat: ",d" };
    }
    const ticks = timeTicks(range[0], range[1], Math.max(3, Math.floor(this.width / 95)));
    return { ...shared, tickmode: "array", tickvals: ticks.values, ticktext: ticks.text };
  }

  // Returns the legend above the plot, and the space that it takes.
  legend(count) {
    const columns = Math.max(1, Math.floor(this.plotWidth / LEGEND_ENTRY_PX));
    const above = LEGEND_ROW_PX * Math.ceil(count / columns);
    const { font } = this.scene.theme.template.layout;
    const place = { orientation: "h", x: 0, y: 1, yanchor: "bottom", itemdoubleclick: false };
    return { above, legend: { ...place, font, entrywidth: LEGEND_ENTRY_PX - 36 } };
  }

  figure() {
    const { spec, scene } = this;
    const axes = {};
    const scales = {};
    const units = [];
    for (const [name, key] of Object.entries({ y: "yaxis", y2: "yaxis2" })) {
      if (!spec[name]) continue;
      const top = this.top(name);
      scales[name] = scaleFor(spec[name].unit, top);
      axes[key] = this.yAxis(spec[name], top, scales[name].factor);
      // An axis without a value has neither numbers nor a unit.
      if (this.spec.traces.some((line) => line.axis === name && holds(this.column(line))))
        units.push(scales[name].unit);
      else Object.assign(axes[key], { showticklabels: false, showgrid: false });
    }
    // Plotly's default, ticks at the places of the left axis, has values such as 36.44.
    if (spec.y2)
      Object.assign(axes.yaxis2, {
        ...{ overlaying: "y", side: "right", showgrid: false, tickmode: "auto" },
      });
    setText(this.unit, units.filter(Boolean).join(" · "));
    const data = this.spec.traces.flatMap((trace) => this.drawn(trace, scales[trace.axis]));
    const entries = data.filter(({ showlegend }) => showlegend !== false).length;
    const { above, legend } = this.legend(entries);
    const marks = this.marks();
    const layout = {
      ...{ template: scene.theme.template, ...axes, xaxis: this.xAxis(), legend, ...marks },
      ...{ width: this.width, height: this.height + above, dragmode: "zoom", showlegend: true },
      ...{ margin: { ...this.box, t: MARGIN.t + above - LEGEND_ROW_PX, autoexpand: false } },
      ...{ hovermode: "x unified", hoverdistance: -1, modebar: { uirevision: 1 } },
    };
    return { data, layout };
  }

  // Returns shapes and labels of events, and of stretches without finite values.
  marks() {
    const { scene, store } = this;
    const [from, to] = store.range;
    const marks = scene.marks.filter(({ x }) => x >= from && x <= to);
    const spans = this.oddSpans().map((span) => ({ ...span, from: Math.max(span.from, from) }));
    const place = (x) => this.box.l + ((x - from) / (to - from)) * this.plotWidth;
    const { metrics } = store.layout;
    return markShapes(marks, spans, place, this.width - this.box.r, scene.theme, metrics);
  }

  draw() {
    const { data, layout } = this.figure();
    this.dirty = false;
    this.drawnAt = performance.now();
    layout.datarevision = this.drawnAt;
    this.stage.style.height = `${layout.height}px`;
    if (this.plotted) this.scene.Plotly.react(this.plot, data, layout, this.config);
    else this.plotFirst(data, layout);
    const { mean = [] } = (this.spec.traces.length && this.column(this.spec.traces[0])) || {};
    setAttribute(this.node, "data-points", mean.filter((value) => value !== null).length);
    if (this.keyX !== null) this.readAt(this.keyX);
    this.showReason();
  }

  oddSpans() {
    return this.spec.traces.flatMap((trace) => {
      const column = this.column(trace);
      if (!column || this.hidden(trace)) return [];
      return oddSpans(xsOf(this.source(trace), this.store.axis), column, this.store.range);
    });
  }

  // Shows why nothing is drawn.
  showReason() {
    const columns = this.spec.traces.map((trace) => this.column(trace));
    const empty = this.spec.empty || "No values yet.";
    const reason = columns.some(recorded) ? "Every value is NaN or infinite." : empty;
    showText(this.none, columns.some(holds) ? "" : reason);
  }

  // Another object would let Plotly build the whole plot again.
  makeConfig() {
    const filename = `${this.store.run}-${this.spec.id}`.replace(/[^\w.-]+/g, "-");
    const image = { filename, width: 1200, height: 500, scale: 2 };
    const svg = {
      ...{ name: "svg", title: "Download plot as an SVG", icon: this.scene.Plotly.Icons.disk },
      click: (plot) => this.scene.Plotly.downloadImage(plot, { ...image, format: "svg" }),
    };
    return {
      ...{ displaylogo: false, responsive: false, doubleClick: false, showTips: false },
      ...{
        modeBarButtons: [
          ["toImage", svg],
          ["zoom2d", "pan2d"],
        ],
        toImageButtonOptions: image,
      },
    };
  }

  plotFirst(data, layout) {
    this.stage.classList.remove("ss-skeleton");
    this.plotted = true;
    this.config = this.makeConfig();
    this.scene.Plotly.newPlot(this.plot, data, layout, this.config);
    this.plot.on("plotly_relayout", (change) => {
      const range = [change["xaxis.range[0]"], change["xaxis.range[1]"]];
      if (range.every(isNumber)) this.store.zoomTo(range);
    });
    this.plot.on("plotly_doubleclick", () => this.store.zoomTo(null));
    this.plot.on("plotly_legendclick", ({ data: lines, curveNumber }) => {
      this.store.toggleHidden(`${this.spec.id}/${lines[curveNumber].meta}`);
      this.scene.redraw(this);
      return false;
    });
  }

  // Reads values by arrow keys, from the newest one on.
  press(event) {
    const steps = { ArrowLeft: -1, ArrowRight: 1 }[event.key];
    if (!steps || !this.plotted) return;
    event.preventDefault();
    const [from, to] = this.store.range;
    const x = (this.keyX ?? to) + steps * KEY_STEP * (to - from);
    this.readAt(Math.max(from, Math.min(to, x)));
  }

  readAt(x) {
    this.keyX = x;
    if (!this.plotted) return;
    const { Fx } = this.scene.Plotly;
    if (x === null) Fx.unhover(this.plot);
    else Fx.hover(this.plot, { xval: x, yval: 0 }, ["xy"]);
  }

  close() {
    if (this.plotted) this.scene.Plotly.purge(this.plot);
    this.plotted = false;
  }
}
