// The memory breakdown of a run on the Memory tab: the stack over the whole run, and its table of
// the parts in the order and colors of the stack, now and at their peaks. The table is the legend:
// a press on a part shows or hides it.

import { ChartView } from "./chart_view.js";
import { el, mounting, parts, say, setAttribute, setText } from "./dom.js";
import { MISSING, clock, isNumber, percent, withUnit } from "./format.js";
import { bisect, xsOf } from "./lines.js";

const PACE_MS = 1_000;
const ENDED_PACE_MS = 3_000;
const TOTAL = "ledger/total";

// The lines of the table, top to bottom, as {key, label, color, keys, depth, trace}: a sum of several
// parts stands before the first of them and has no trace. A part is listed if it has a value, a sum
// if it has more than one part.
export function linesOf(traces, sums, moment) {
  const has = (key) => isNumber(moment?.v[key]);
  const open = sums
    .map((sum) => ({ ...sum, keys: sum.of.filter(has) }))
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

// The bytes of a line at a moment, null where it has none of its parts then.
export function bytesAt(moment, keys) {
  const known = keys.map((key) => moment?.v[key]).filter(isNumber);
  return known.length ? known.reduce((sum, value) => sum + value, 0) : null;
}

// The moment of the series at x, or before it; null before the first.
export function momentAt(series, axis, x) {
  if (!series?.t.length) return null;
  const xs = xsOf(series, axis);
  let at = Math.min(bisect(xs, x), xs.length - 1);
  const columns = Object.entries(series.v);
  while (at > 0 && columns.every(([, { mean }]) => mean[at] === null)) at -= 1;
  const v = Object.fromEntries(columns.map(([key, { mean }]) => [key, mean[at]]));
  return { t: series.t[at], s: series.s[at], v };
}

class LedgerTable {
  // `pick(trace)` is called when a part is pressed.
  constructor(pick) {
    this.pick = pick;
    this.rows = [];
    this.shown = "";
    const table = parts(`<div class="ss-ledger-table" data-testid="ledger-table"><table>
      <thead><tr><th scope="col">Part</th><th scope="col" ref="when"></th>
        <th scope="col">Peak</th></tr></thead><tbody ref="body"></tbody></table>
      <p class="ss-muted ss-ledger-when">Peak: the highest value of each row during the run, each
        at its own time.</p></div>`);
    Object.assign(this, table);
  }

  // `title` and `moment` are of the first column; `peaks` are bytes by key, each at its own time.
  update({ traces, sums, hidden }, title, moment, peaks) {
    const lines = linesOf(traces, sums, moment);
    const shape = JSON.stringify(lines);
    if (shape !== this.shown) this.build(lines);
    this.shown = shape;
    setText(this.when, title);
    for (const { line, button, cells } of this.rows) {
      if (line.trace) setAttribute(button, "aria-pressed", !hidden(line.trace));
      fill(cells[0], bytesAt(moment, line.keys), moment?.v[TOTAL]);
      fill(cells[1], peaks[line.key] ?? null, 0);
    }
  }

  build(lines) {
    this.rows = lines.map((line) => this.row(line));
    const total = { key: TOTAL, label: "total", color: "gray", keys: [TOTAL], depth: 0 };
    this.rows.push(this.row(total));
    this.body.replaceChildren(...this.rows.map(({ node }) => node));
  }

  row(line) {
    const { trace, depth } = line;
    const sum = line.keys.length > 1 || line.keys[0] === TOTAL;
    const swatch = el("i", { style: `--ss-part:var(--ss-${line.color})`, "data-sum": sum || null });
    const name = el("span", {}, line.label);
    const pressed = { type: "button", title: trace?.help, onclick: () => this.pick(trace) };
    const button = trace ? el("button", pressed, swatch, name) : el("span", {}, swatch, name);
    const cells = [cell(), cell()];
    const head = el("th", { scope: "row", style: `--ss-depth:${depth}` }, button);
    const attributes = { "data-part": line.keys.length > 1 ? `sum:${line.label}` : line.keys[0] };
    const node = el("tr", attributes, head, ...cells.map((each) => each.node));
    if (sum) node.classList.add("ss-ledger-sum");
    return { line, button, cells, node };
  }
}

function cell() {
  const [size, share] = [el("span"), el("span", { class: "ss-muted" })];
  return { node: el("td", {}, size, share), size, share };
}

// "12 %"; what is there is never 0 %.
export function shareOf(bytes, total) {
  const share = (100 * bytes) / total;
  return share > 0 && share < 0.01 ? "<0.01 %" : percent(share);
}

function fill({ size, share }, bytes, total) {
  setText(size, bytes === null ? MISSING : withUnit(bytes, "B"));
  setText(share, bytes !== null && total > 0 ? shareOf(bytes, total) : "");
}

class LedgerView extends ChartView {
  constructor(parent) {
    super("ledger");
    this.table = new LedgerTable((trace) => this.pick(trace));
    this.painter.onHover = () => this.showTable();
    const view = parts(`<div class="ss-root ss-ledger" data-testid="stepscope-ledger"
      data-polls="0">
      <p class="ss-trouble" hidden ref="trouble"></p>
      <div class="ss-body" ref="body">
        <div class="ss-ledger-sides" ref="sides"></div>
        <div class="ss-ledger-notes" data-testid="ledger-notes" ref="notes"></div>
      </div>
    </div>`);
    Object.assign(this, view, { root: view.node });
    this.sides.append(this.board.node, this.table.node);
    this.body.prepend(this.bar.node);
    parent.append(this.root);
  }

  configureParts({ run }) {
    this.body.hidden = !run;
  }

  pace() {
    return this.store.ended ? ENDED_PACE_MS : PACE_MS;
  }

  show() {
    this.showTable();
  }

  showTable() {
    const { store, painter } = this;
    const [card] = this.board.cards;
    const { ledger } = store.answer || {};
    this.table.node.hidden = !ledger;
    if (!ledger || !card) return;
    const at = painter.hoverX;
    const title = at === null ? (store.ended ? "At the end" : "Now") : `At ${clock(at)}`;
    const moment = at === null ? ledger.now : momentAt(store.source("ledger"), store.axis, at);
    const { sums } = store.layout;
    const shown = { traces: card.spec.traces, sums, hidden: (trace) => card.hidden(trace) };
    this.table.update(shown, title, moment, ledger.peaks);
    const text = ledger.notes.join("\n");
    if (this.noted === text) return;
    this.noted = text;
    this.notes.replaceChildren(...ledger.notes.map((note) => el("p", { class: "ss-muted" }, note)));
  }

  pick(trace) {
    this.board.cards[0].pick(trace);
    this.showTable();
  }

  setTrouble(sentence) {
    say(this.trouble, sentence);
  }

  refused(sentence) {
    say(this.trouble, sentence);
  }
}

export const stepscopeLedger = mounting("stepscopeLedgers", LedgerView);
