// The chart of the memory breakdown: parts stacked up to the total. On the Overview the user switches
// between the stack and lines.

import { Card } from "./card.js";
import { button, el, setAttribute, setText, showText } from "./dom.js";
import { MISSING, sum } from "./format.js";
import { breaks, holds, visibleSpan, xsOf } from "./lines.js";
import { thinned } from "./series.js";

const MIN_MOMENT_PX = 2;
const SINGLE_MOMENT_PX = 3;

const isPart = (trace) => trace.style === "part";
const isStacked = (trace) => trace.series === "ledger";

// Indices of the moments in the range that have any part.
function momentsIn(xs, columns, range) {
  const [from, to] = visibleSpan(xs, range);
  return Array.from({ length: to - from }, (_, i) => from + i).filter((i) =>
    columns.some((values) => values[i] !== null),
  );
}

// Returns the stack as {x, ys} for Plotly's stackgroup. A moment without any part is skipped; a long
// gap ends the stack. A single moment is `width` wide. A missing part is zero: another part then
// includes its bytes.
export function stacked(xs, columns, range, factor, times, width = 0) {
  const broken = breaks(times);
  const [x, ys] = [[], columns.map(() => [])];
  const add = (at, valueOf) => {
    x.push(at);
    columns.forEach((values, part) => ys[part].push(valueOf(values)));
  };
  let held = -1;
  const moments = momentsIn(xs, columns, range);
  for (const i of moments) {
    if (held >= 0 && broken(held, i)) for (const at of [held, i]) add(xs[at], () => 0);
    add(xs[i], (values) => (values[i] ?? 0) / factor);
    held = i;
  }
  if (moments.length === 1) add(xs[held] + width, (values) => (values[held] ?? 0) / factor);
  return { x, ys };
}

// The highest stack of the columns in the range.
export function stackTop(xs, columns, range) {
  const sums = momentsIn(xs, columns, range).map((i) => sum(columns.map((values) => values[i])));
  return Math.max(0, ...sums);
}

export class BreakdownCard extends Card {
  build() {
    this.switchable = !this.spec.traces.every(isStacked);
    super.build();
    for (const { node, label, trace } of this.chips) {
      setText(label, trace.short ?? trace.label);
      if (isStacked(trace)) setAttribute(node, "title", trace.help || "Show or hide the total");
      node.classList.toggle("ss-part", isPart(trace));
    }
    this.unknown = el("p", { class: "ss-muted ss-note", hidden: "" });
    if (this.switchable) this.legend.after(this.unknown);
    this.showMode();
  }

  buttons() {
    const attributes = { class: "ss-tool", title: "Scale the axis to the total or to usage" };
    this.whole = button(() => this.pick(this.free), attributes, "full scale");
    const list = [...super.buttons(), this.whole];
    if (!this.switchable) return list;
    const mode = (stacked, label, title) => button(() => this.choose(stacked), { title }, label);
    this.modes = [
      mode(false, "Lines", "Allocated, reserved, peak and used as lines"),
      mode(true, "Breakdown", "Stacked parts of the memory"),
    ];
    const group = { class: "ss-switch ss-modes", role: "group", "aria-label": "Memory as" };
    return [...list, el("div", group, ...this.modes)];
  }

  get free() {
    return this.spec.traces.find(isPart);
  }

  pick(trace) {
    super.pick(trace);
    this.showMode();
  }

  // True if parts are drawn, false for lines.
  get stacked() {
    return !this.switchable || this.store.prefs.stacked;
  }

  choose(stacked) {
    if (stacked === this.stacked) return;
    this.store.showStacked(stacked);
    this.showMode();
    this.scene.redraw(this);
  }

  showMode() {
    if (this.full) this.full.hidden = this.stacked;
    this.whole.hidden = !this.stacked;
    setAttribute(this.whole, "aria-pressed", !this.hidden(this.free));
    this.legend.classList.toggle("ss-parts", this.stacked);
    this.modes?.forEach((node, i) =>
      setAttribute(node, "aria-pressed", Boolean(i) === this.stacked),
    );
  }

  // Shows which parts are unknown, and why.
  showHeld() {
    super.showHeld();
    const { notes = [] } = this.store.answer?.ledger ?? {};
    showText(this.unknown, this.stacked ? notes.join(" ") : "");
  }

  get lines() {
    return this.spec.traces.filter((trace) => isStacked(trace) === this.stacked);
  }

  // The drawn parts, from the bottom of the stack to its top.
  get parts() {
    const shown = (trace) => isPart(trace) && !this.hidden(trace) && holds(this.column(trace));
    return this.spec.traces.filter(shown).reverse();
  }

  // A line and a part may have the same label.
  lineName(trace) {
    return isStacked(trace) ? `${this.spec.id}/${trace.metric}` : super.lineName(trace);
  }

  // A part that another part includes now has no value; its chip stays for earlier moments.
  valueText(trace, x) {
    const text = super.valueText(trace, x);
    return isPart(trace) && text === MISSING ? "" : text;
  }

  top(axis) {
    if (!this.stacked) return super.top(axis);
    const series = this.store.source("ledger");
    if (!series) return 0;
    const all = this.spec.traces.filter(isPart).every((trace) => !this.hidden(trace));
    const total = all && series.v["ledger/total"];
    if (total) return Math.max(0, ...total.mean.slice(...this.span(series)));
    const columns = this.parts.map((trace) => series.v[trace.metric].mean);
    return stackTop(xsOf(series, this.store.axis), columns, this.store.range);
  }

  traces(factors) {
    if (!this.stacked) return super.traces(factors);
    const { parts, store } = this;
    if (!parts.length) return [];
    const { axis, range } = store;
    const count = this.plotWidth / MIN_MOMENT_PX;
    const series = thinned(store.source("ledger"), axis, range, count);
    const columns = parts.map((trace) => series.v[trace.metric].mean);
    const width = (SINGLE_MOMENT_PX * (range[1] - range[0])) / this.plotWidth;
    const { x, ys } = stacked(xsOf(series, axis), columns, range, factors.y, series.t, width);
    const { palette, background } = this.scene.theme;
    const areas = parts.map(({ label, color }, i) => ({
      ...{ type: "scatter", mode: "lines", name: label, hoverinfo: "skip", x, y: ys[i] },
      ...{ stackgroup: "parts", fillcolor: palette[color] },
      line: { width: 0.6, color: background },
    }));
    const total = this.lines.filter((trace) => !isPart(trace));
    return [...areas, ...total.flatMap((trace) => this.drawn(trace, factors.y))];
  }
}
