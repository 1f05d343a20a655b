// The chart of where memory goes: parts on top of each other up to the total. On the Live page the
// reader switches between it and the lines of the same chart.

import { Card } from "./card.js";
import { el, setAttribute, setText } from "./dom.js";
import { MISSING } from "./format.js";
import { holds } from "./nonfinite.js";
import { visibleSpan, xsOf } from "./lines.js";
import { coarsen } from "./series.js";
import { stackAreas, stackTop } from "./stack.js";

const POINT_WIDTH = 2; // px, at least, from one moment to the next
const SINGLE_WIDTH = 3; // px, of a moment alone

const isPart = (trace) => trace.style === "part";
const ofLedger = (trace) => trace.series === "ledger";

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
    const areas = stackAreas(xs, columns, store.range, factors.y, series.t, least).map(
      (area, i) => ({
        ...{ type: "scatter", mode: "lines", name: parts[i].label, hoverinfo: "skip", ...area },
        ...{ fill: "toself", fillcolor: theme.palette[parts[i].color] },
        line: { width: 0.6, color: theme.background },
      }),
    );
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
