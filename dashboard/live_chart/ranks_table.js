// The table of the ranks: sortable by each column, a tick for a line.

import { el, parts, setAttribute, setText } from "./dom.js";
import { MISSING, clock, isNumber, percent, withUnit } from "./format.js";
import { sorted, stateWords, usualSort, wentWrong } from "./ranks_data.js";

const MIB = 2 ** 20;
const seconds = (value) => withUnit(value, "s");
const share = (value) => (isNumber(value) ? percent(value) : MISSING);
const size = (value) => (isNumber(value) ? withUnit(value * MIB, "B") : MISSING);

// By key: title, help, text of a value, whether it is a number, whether it stays away without one.
// The state is second, so that it is in view on a phone too.
const WAITS =
  "Share of the step spent in backward waiting for other ranks; the slowest waits least";
const COUNT = (value) => value.toLocaleString("en-US");
export const COLUMNS = [
  ["rank", "Rank", "Global rank", String, true],
  ["state", "State", "Alive: the process is still recording", null],
  ["host", "Host", "Host name", String],
  ["place", "Device", "The GPU by its index on that host", String],
  ["time", "Step time", "Mean of the last 128 steps, waiting for ranks included", seconds, true],
  ["own", "Busy time", "Step time minus waits; the longest is the straggler", seconds, true, true],
  ["wait", "Waits", WAITS, share, true, true],
  ["data", "Data wait", "Share of the step that it waits for its next batch", share, true, true],
  ["memory", "Allocated", "Newest value", size, true],
  ["peak", "Peak", "Highest value since the start or the last reset", size, true],
  ["step", "Last step", "Latest recorded step", COUNT, true],
];

// Whether the first press on a column's title puts the highest value first.
export const startsDescending = (key) =>
  key !== "rank" && COLUMNS.some(([other, , , , number]) => other === key && number);

export class RankTable {
  // `toggle(row)` is called when a rank's line is wanted, or no longer.
  constructor(toggle) {
    this.toggle = toggle;
    this.chosen = null; // {key, descending} that the reader chose
    this.heads = COLUMNS.map(([key, title, help, , number]) => {
      const press = { type: "button", title: help, onclick: () => this.sort(key) };
      const button = el("button", press, title);
      const node = el("th", { scope: "col", class: number ? "ss-figure" : null }, button);
      return { key, title, button, node };
    });
    const table = parts(`<div class="ss-scroll ss-rank-table" tabindex="0" role="region"
      aria-label="Table of the ranks" data-testid="rank-table"><table>
      <thead><tr ref="head"><th scope="col"><span class="ss-spoken">Line</span></th></tr></thead>
      <tbody ref="body"></tbody></table></div>`);
    Object.assign(this, table);
    this.head.append(...this.heads.map(({ node }) => node));
    this.lines = new Map();
  }

  open() {
    this.chosen = null;
  }

  sort(key) {
    const { key: now, descending } = this.order;
    this.chosen = { key, descending: now === key ? !descending : startsDescending(key) };
    this.update(this.data, this.verdict, this.marked, this.picked);
  }

  update(data, verdict, marked, picked) {
    Object.assign(this, { data, verdict, marked, picked });
    const rows = data.rows();
    this.order = this.chosen ?? usualSort(verdict, rows);
    const shown = COLUMNS.map(
      ([key, , , , , hide]) => !hide || rows.some((row) => isNumber(row[key])),
    );
    this.heads.forEach(({ key, title, button, node }, i) => {
      const own = this.order.key === key;
      const name = key === "memory" && data.answer.memory === "process" ? "Process memory" : title;
      setText(button, own ? `${name} ${this.order.descending ? "↓" : "↑"}` : name);
      setAttribute(
        node,
        "aria-sort",
        own ? (this.order.descending ? "descending" : "ascending") : null,
      );
      node.hidden = !shown[i];
    });
    const lines = sorted(rows, this.order.key, this.order.descending).map((row) =>
      this.line(row, shown),
    );
    const same =
      lines.length === this.body.childElementCount &&
      lines.every((line, i) => this.body.children[i] === line);
    if (!same) this.body.replaceChildren(...lines);
  }

  // The line of a rank, made once and then only changed, so that a tick keeps the focus.
  line(row, shown) {
    let line = this.lines.get(row.number);
    if (!line) this.lines.set(row.number, (line = this.make(row)));
    line.row = row.row;
    line.tick.hidden = row.row === null;
    setAttribute(line.node, "data-named", this.marked.has(row.row) || null);
    setAttribute(line.node, "data-tone", wentWrong(row) ? "bad" : null);
    line.tick.checked = this.picked.has(row.row);
    COLUMNS.forEach(([key, , , text], i) => {
      const value = row[key];
      const known = value !== null && value !== undefined && value !== "";
      setText(
        line.cells[i],
        key === "state" ? stateWords(row, clock) : known ? text(value) : MISSING,
      );
      line.cells[i].hidden = !shown[i];
      if (key === "state") setAttribute(line.cells[i], "title", row.ended?.reason ?? null);
    });
    return line.node;
  }

  make(row) {
    const line = {
      cells: COLUMNS.map(([key, , , , number]) =>
        el("td", { class: number ? "ss-figure" : null, "data-column": key }),
      ),
    };
    line.tick = el("input", {
      type: "checkbox",
      "aria-label": `Line of rank ${row.rank}`,
      onchange: () => this.toggle(line.row),
    });
    line.node = el("tr", { "data-rank": row.rank }, el("td", {}, line.tick), ...line.cells);
    return line;
  }
}
