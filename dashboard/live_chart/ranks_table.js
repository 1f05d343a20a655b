// The table of the ranks: sortable by each column, with a checkbox per rank for its line.

import { button, el, parts, render } from "./dom.js";
import { MISSING, clock, counted, isNumber, percent, withUnit } from "./format.js";
import { isKnown, sorted, stateWords, usualSort, wentWrong } from "./ranks_data.js";

const MIB = 2 ** 20;
const seconds = (value) => withUnit(value, "s");
const share = (value) => (isNumber(value) ? percent(value) : MISSING);
const size = (value) => (isNumber(value) ? withUnit(value * MIB, "B") : MISSING);
const WAITS =
  "Share of the step spent in backward waiting for other ranks; the slowest waits least";

// By key: title, help, text of a value, true for numbers, true if hidden without values. The state is
// second: in view on a phone too.
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
  ["step", "Last step", "Latest recorded step", counted, true],
];

// True if the first press on a column's title sorts the highest value first.
export const startsDescending = (key) =>
  key !== "rank" && COLUMNS.some(([other, , , , number]) => other === key && number);

export class RankTable {
  // `toggle(row)` is called for a press on a rank's checkbox.
  constructor(toggle) {
    this.toggle = toggle;
    this.chosen = null; // {key, descending}, the user's choice
    const table = parts(`<div class="ss-scroll ss-rank-table" tabindex="0" role="region"
      aria-label="Table of the ranks" data-testid="rank-table"><table>
      <thead><tr ref="head"></tr></thead><tbody ref="body"></tbody></table></div>`);
    Object.assign(this, table);
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
    const shown = COLUMNS.filter(
      ([key, , , , , optional]) => !optional || rows.some((row) => isNumber(row[key])),
    );
    const line = el("span", { class: "ss-spoken" }, "Line");
    render(this.head, el("th", { scope: "col" }, line), ...shown.map((each) => this.title(each)));
    const { key, descending } = this.order;
    render(this.body, ...sorted(rows, key, descending).map((row) => this.line(row, shown)));
  }

  title([key, title, help, , number]) {
    const down = this.order.key === key ? this.order.descending : null;
    const name =
      key === "memory" && this.data.answer.memory === "process" ? "Process memory" : title;
    const sort = down === null ? null : down ? "descending" : "ascending";
    const text = down === null ? name : `${name} ${down ? "↓" : "↑"}`;
    return el(
      "th",
      { scope: "col", class: number ? "ss-figure" : null, "aria-sort": sort },
      button(() => this.sort(key), { title: help }, text),
    );
  }

  line(row, columns) {
    const tick = el("input", {
      type: "checkbox",
      "aria-label": `Line of rank ${row.rank}`,
      checked: this.picked.has(row.row) ? "" : null,
      hidden: row.row === null ? "" : null,
      onclick: () => this.toggle(row.row),
    });
    const cells = columns.map(([key, , , text, number]) => {
      const attributes = { class: number ? "ss-figure" : null, "data-column": key };
      if (key === "state")
        Object.assign(attributes, { class: "ss-kind", title: row.ended?.reason });
      const known = isKnown(row[key]) ? () => text(row[key]) : () => MISSING;
      return el("td", attributes, key === "state" ? stateWords(row, clock) : known());
    });
    return el(
      "tr",
      {
        "data-rank": row.rank,
        "data-named": this.marked.has(row.row) || null,
        "data-tone": wentWrong(row) ? "bad" : null,
      },
      el("td", {}, tick),
      ...cells,
    );
  }
}
