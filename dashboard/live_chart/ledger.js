// The memory breakdown: the stack over the run, and a table of its parts, which is the legend.

import { ChartView } from "./chart_view.js";
import { button, el, mounting, parts, render, setText, showText } from "./dom.js";
import { clock, isNumber, percent, sum, withUnit } from "./format.js";
import { bisect, xsOf } from "./series.js";

const PACE_MS = 1_000;
const ENDED_PACE_MS = 3_000;
const TOTAL = "ledger/total";
const TOTAL_LINE = { key: TOTAL, label: "total", color: "gray", keys: [TOTAL], depth: 0 };

// Returns the rows {key, label, color, keys, depth, trace}: sums, without trace, precede their parts.
export function linesOf(traces, sums, moment) {
  const has = (key) => isNumber(moment?.v[key]);
  const open = sums
    .map((each) => ({ ...each, keys: each.of.filter(has) }))
    .filter(({ keys }) => keys.length > 1);
  const listed = new Set();
  const lines = [];
  for (const trace of traces) {
    if (trace.style !== "part" || !has(trace.metric)) continue;
    const around = open.filter(({ keys }) => keys.includes(trace.metric));
    around.forEach(({ key, label, color, keys }, depth) => {
      if (!listed.has(label)) lines.push({ key, label, color, keys, depth, trace: null });
      listed.add(label);
    });
    const { label, color, metric } = trace;
    lines.push({ key: metric, label, color, keys: [metric], depth: around.length, trace });
  }
  return lines;
}

export function bytesAt(moment, keys) {
  const known = keys.map((key) => moment?.v[key]).filter(isNumber);
  return known.length ? sum(known) : null;
}

// Returns the newest moment of the series up to x; null before the first one.
export function momentAt(series, axis, x) {
  if (!series?.t.length) return null;
  const xs = xsOf(series, axis);
  let at = Math.min(bisect(xs, x), xs.length - 1);
  const columns = Object.entries(series.v);
  while (at > 0 && columns.every(([, { mean }]) => mean[at] === null)) at -= 1;
  const v = Object.fromEntries(columns.map(([key, { mean }]) => [key, mean[at]]));
  return { t: series.t[at], s: series.s[at], v };
}

// "12%"; a positive share is never "0%".
export function shareOf(bytes, total) {
  const share = (100 * bytes) / total;
  return share > 0 && share < 0.01 ? "<0.01%" : percent(share);
}

class LedgerView extends ChartView {
  constructor(parent) {
    super("ledger");
    this.painter.onHover = () => this.showTable();
    const view = parts(`<div class="ss-root ss-ledger" data-testid="stepscope-ledger"
      data-polls="0">
      <p class="ss-warning" hidden ref="trouble"></p>
      <div class="ss-body" ref="body">
        <div class="ss-ledger-sides" ref="sides">
          <div class="ss-box ss-ledger-table" data-testid="ledger-table" ref="table"><table>
            <thead><tr><th scope="col">Part</th><th scope="col" ref="when">Now</th>
              <th scope="col">Peak</th></tr></thead><tbody ref="rows"></tbody></table>
            <p class="ss-muted ss-note">Peak: the highest value of each row during the run, each at
              its own time.</p></div>
        </div>
        <div data-testid="ledger-notes" ref="notes"></div>
      </div>
    </div>`);
    Object.assign(this, view, { root: view.node });
    this.sides.prepend(this.board.node);
    this.body.prepend(this.bar.node);
    parent.append(this.root);
  }

  pace() {
    return this.store.ended ? ENDED_PACE_MS : PACE_MS;
  }

  show() {
    this.showTable();
  }

  // Shows the parts at the crosshair, else now, and their peaks.
  showTable() {
    const { store, painter } = this;
    const [card] = this.board.cards;
    const { ledger } = store.answer || {};
    this.table.hidden = !ledger;
    if (!ledger || !card) return;
    const at = painter.hoverX;
    setText(this.when, at === null ? (store.ended ? "At the end" : "Now") : `At ${clock(at)}`);
    const moment = at === null ? ledger.now : momentAt(store.source("ledger"), store.axis, at);
    const lines = linesOf(card.spec.traces, store.layout.sums, moment);
    const row = (line) => this.row(card, line, moment, ledger.peaks[line.key] ?? null);
    render(this.rows, ...[...lines, TOTAL_LINE].map(row));
    render(this.notes, ...ledger.notes.map((note) => el("p", { class: "ss-muted" }, note)));
  }

  row(card, { label, color, keys, depth, trace }, moment, peak) {
    const isSum = !trace;
    const swatch = el("i", { style: `--ss-part:var(--ss-${color})`, "data-sum": isSum || null });
    const pick = () => {
      card.pick(trace);
      this.showTable();
    };
    const [bytes, total] = [bytesAt(moment, keys), moment?.v[TOTAL]];
    const share = bytes !== null && total > 0 ? shareOf(bytes, total) : "";
    const name = el("span", {}, label);
    const head = isSum
      ? el("span", {}, swatch, name)
      : button(pick, { title: trace.help, "aria-pressed": !card.hidden(trace) }, swatch, name);
    const part = keys.length > 1 ? `sum:${label}` : keys[0];
    return el(
      "tr",
      { "data-part": part, class: isSum ? "ss-ledger-sum" : null },
      el("th", { scope: "row", style: `--ss-depth:${depth}` }, head),
      el("td", {}, el("span", {}, withUnit(bytes, "B")), el("span", { class: "ss-muted" }, share)),
      el("td", {}, withUnit(peak, "B")),
    );
  }

  setTrouble(sentence) {
    showText(this.trouble, sentence);
  }
}

export const stepscopeLedger = mounting("stepscopeLedgers", LedgerView);
