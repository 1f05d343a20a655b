// The chart of where memory goes: parts on top of each other up to the total. On the Live page the
// reader switches between it and the lines of the same chart.

import { Card } from "./card.js";
import { el, setAttribute, setText } from "./dom.js";
import { MISSING } from "./format.js";
import { breaks, holds, visibleSpan, xsOf } from "./lines.js";
import { coarsen } from "./series.js";

const POINT_WIDTH = 2; // px, at least, from one moment to the next
const SINGLE_WIDTH = 3; // px, of a moment alone

const isPart = (trace) => trace.style === "part";
const ofLedger = (trace) => trace.series === "ledger";

// Indices of the moments in the range that have any part.
function momentsIn(xs, columns, range) {
  const [from, to] = visibleSpan(xs, range);
  return Array.from({ length: to - from }, (_, i) => from + i).filter((i) =>
    columns.some((values) => values[i] !== null),
  );
}

// Parts on top of each other as {x, ys} for Plotly's stackgroup. A moment without any part is left
// out; where they are missing for long the stack ends, and begins anew. A single moment is `least`
// wide. A part that a moment does not have is zero: another part then holds its bytes.
export function stacked(xs, columns, range, factor, times, least = 0) {
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
  if (moments.length === 1) add(xs[held] + least, (values) => (values[held] ?? 0) / factor);
  return { x, ys };
}

// The highest stack of the columns within the range.
export function stackTop(xs, columns, range) {
  const sums = momentsIn(xs, columns, range).map((i) =>
    columns.reduce((sum, values) => sum + (values[i] ?? 0), 0),
  );
  return Math.max(0, ...sums);
}

export class LedgerCard extends Card {
  build() {
    this.switchable = !this.spec.traces.every(ofLedger);
    super.build();
    for (const { node, label, trace } of this.chips) {
      setText(label, trace.short ?? trace.label);
      if (ofLedger(trace)) setAttribute(node, "title", trace.help || "Show or hide the total");
      if (isPart(trace)) node.classList.add("ss-part");
    }
    this.note = el("p", { class: "ss-note", hidden: "" });
    if (this.switchable) this.legend.after(this.note);
    this.showMode();
  }

  buttons() {
    this.whole = el(
      "button",
      {
        type: "button",
        class: "ss-tool",
        title: "Scale the axis to the total or to usage",
        onclick: () => this.pick(this.free),
      },
      "full scale",
    );
    const list = super.buttons();
    if (!this.switchable) return [...list.filter((node) => !("full" in node.dataset)), this.whole];
    const mode = (stacked, label, title) =>
      el("button", { type: "button", title, onclick: () => this.choose(stacked) }, label);
    this.modes = [
      mode(false, "Lines", "Allocated, reserved, peak and used as lines"),
      mode(true, "Breakdown", "Stacked parts of the memory"),
    ];
    const attributes = { class: "ss-switch ss-modes", role: "group", "aria-label": "Memory as" };
    return [...list, this.whole, el("div", attributes, ...this.modes)];
  }

  get free() {
    return this.spec.traces.find(isPart);
  }

  pick(trace) {
    super.pick(trace);
    this.showMode();
  }

  // Whether the parts are drawn, not the lines.
  get stacked() {
    return !this.switchable || this.scene.store.prefs.stacked;
  }

  choose(stacked) {
    if (stacked === this.stacked) return;
    this.scene.store.showStacked(stacked);
    this.showMode();
    this.scene.redraw(this);
  }

  showMode() {
    const full = this.tools.querySelector("[data-full]");
    if (full) full.hidden = this.stacked;
    this.whole.hidden = !this.stacked;
    setAttribute(this.whole, "aria-pressed", !this.hidden(this.free));
    this.legend.classList.toggle("ss-parts", this.stacked);
    this.modes?.forEach((node, i) =>
      setAttribute(node, "aria-pressed", Boolean(i) === this.stacked),
    );
  }

  // Shows which parts are unknown, and why; on the Memory tab the table does.
  showHeld() {
    super.showHeld();
    const { notes = [] } = this.scene.store.answer?.ledger ?? {};
    setText(this.note, notes.join(" "));
    this.note.hidden = !this.stacked || !notes.length;
  }

  get lines() {
    return this.spec.traces.filter((trace) => ofLedger(trace) === this.stacked);
  }

  // The parts that are drawn, from the bottom of the stack to its top.
  get parts() {
    const shown = (trace) => isPart(trace) && !this.hidden(trace) && holds(this.column(trace));
    return this.spec.traces.filter(shown).reverse();
  }

  // Lines and parts may have the same label.
  lineName(trace) {
    return ofLedger(trace) ? `${this.spec.id}/${trace.metric}` : super.lineName(trace);
  }

  // A part that others stand for now has no value; its chip stays for what was before.
  valueText(trace, x) {
    const text = super.valueText(trace, x);
    return isPart(trace) && text === MISSING ? "" : text;
  }

  top(axis) {
    if (!this.stacked) return super.top(axis);
    const { store } = this.scene;
    const series = store.source("ledger");
    if (!series) return 0;
    const columns = this.parts.map((trace) => series.v[trace.metric].mean);
    const xs = xsOf(series, store.axis);
    const all = this.spec.traces.filter(isPart).every((trace) => !this.hidden(trace));
    const total = all && series.v["ledger/total"];
    if (!total) return stackTop(xs, columns, store.range);
    const [from, to] = visibleSpan(xs, store.range);
    return Math.max(0, ...total.mean.slice(from, to));
  }

  traces(factors) {
    if (!this.stacked) return super.traces(factors);
    const { store, theme } = this.scene;
    const { parts } = this;
    if (!parts.length) return [];
    const series = this.moments(store.source("ledger"));
    const xs = xsOf(series, store.axis);
    const columns = parts.map((trace) => series.v[trace.metric].mean);
    const [from, to] = store.range;
    const least = (SINGLE_WIDTH * (to - from)) / (this.width - this.box.l - this.box.r);
    const { x, ys } = stacked(xs, columns, store.range, factors.y, series.t, least);
    const areas = parts.map(({ label, color }, i) => ({
      ...{ type: "scatter", mode: "lines", name: label, hoverinfo: "skip", x, y: ys[i] },
      ...{ stackgroup: "parts", fillcolor: theme.palette[color] },
      line: { width: 0.6, color: theme.background },
    }));
    const total = this.lines.filter((trace) => !isPart(trace) && !this.hidden(trace));
    return [...areas, ...total.flatMap((trace) => this.totalLine(trace, factors))];
  }

  // The ledger's moments at no more points than can be told apart.
  moments(series) {
    const { axis, range } = this.scene.store;
    const [from, to] = visibleSpan(xsOf(series, axis), range);
    const most = (this.width - this.box.l - this.box.r) / POINT_WIDTH;
    const size = 2 ** Math.max(0, Math.ceil(Math.log2((to - from) / most)));
    return coarsen(series, series.bucket * size);
  }

  totalLine(trace, factors) {
    if (!holds(this.column(trace))) return [];
    const { x, y } = this.points(trace, factors.y);
    const color = this.scene.theme.palette[trace.color];
    const line = { color, width: 1.5, dash: trace.dash };
    return [{ type: "scatter", mode: "lines", name: trace.label, hoverinfo: "skip", x, y, line }];
  }
}
