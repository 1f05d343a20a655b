// The table of the memory breakdown: the parts in the order and colors of the chart, now and at their
// peaks. It is also the chart's legend: a press on a part shows or hides it.

import { el, setAttribute, setText } from "./dom.js";
import { MISSING, isNumber, percent, withUnit } from "./format.js";
import { bisect, xsOf } from "./lines.js";

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

export class LedgerTable {
  // `pick(trace)` is called when a part is pressed.
  constructor(pick) {
    this.pick = pick;
    this.rows = [];
    this.shown = "";
    this.heads = [el("th", { scope: "col" }), el("th", { scope: "col" })];
    this.body = el("tbody");
    const head = el("tr", {}, el("th", { scope: "col" }, "Part"), ...this.heads);
    const table = el("table", {}, el("thead", {}, head), this.body);
    this.when = el("p", { class: "ss-muted ss-ledger-when" });
    this.node = el(
      "div",
      { class: "ss-ledger-table", "data-testid": "ledger-table" },
      table,
      this.when,
    );
  }

  // `title` and `moment` are of the first column; `peaks` are bytes by key, each at its own time.
  update({ traces, sums, hidden }, title, moment, peaks) {
    const lines = linesOf(traces, sums, moment);
    const shape = JSON.stringify(lines);
    if (shape !== this.shown) this.build(lines);
    this.shown = shape;
    setText(this.heads[0], title);
    setText(this.heads[1], "Peak");
    for (const { line, button, cells } of this.rows) {
      if (line.trace) setAttribute(button, "aria-pressed", !hidden(line.trace));
      fill(cells[0], bytesAt(moment, line.keys), moment?.v[TOTAL]);
      fill(cells[1], peaks[line.key] ?? null, 0);
    }
    setText(this.when, "Peak: the highest value of each row during the run, each at its own time.");
  }

  build(lines) {
    this.rows = lines.map((line) => this.row(line));
    const total = {
      key: TOTAL,
      label: "total",
      color: "gray",
      keys: [TOTAL],
      depth: 0,
      trace: null,
    };
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
