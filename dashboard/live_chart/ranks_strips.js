// Strips of heat: a row a rank, columns of time or of steps. Drawn on a canvas; the pointer and the arrow keys
// read single values.

import { el, setAttribute, setText } from "./dom.js";
import { isNumber, scaleFor, short, withUnit } from "./format.js";
import { heatRow } from "./heat.js";
import { colorRange, rankCount, rowAt, stripRows } from "./ranks_data.js";
import { withAlpha } from "./theme.js";

const TALL = 384; // px that the rows share
const LEFT = 52; // px for the names of the ranks
const BOTTOM = 18; // px for the times or steps
const LABEL_FROM = 11; // px of a row from which each has its number
const SHADES = 48;
const CELL_WIDTH = 3; // px

export class RankStrips {
  // `pick(row)` is called for a click on a row, `point(x or null)` for the place under the pointer.
  constructor(pick, point) {
    this.pick = pick;
    this.point = point;
    this.canvas = el("canvas", {});
    this.tip = el("div", { class: "ss-tip ss-rank-tip", hidden: "" });
    this.said = el("div", { class: "ss-said", "aria-live": "polite" });
    this.stage = el(
      "div",
      {
        class: "ss-rank-strips",
        tabindex: "0",
        role: "application",
        "aria-roledescription": "heat strips",
        "data-testid": "rank-strips",
      },
      this.canvas,
      this.tip,
    );
    this.low = el("span");
    this.high = el("span");
    this.ramp = el("i");
    this.legend = el("span", { class: "ss-scale" }, this.low, this.ramp, this.high);
    this.node = el("div", {}, this.stage, this.said);
    this.cursor = null; // {row, column} that is read
    this.stage.addEventListener("pointermove", (event) => this.hover(event));
    this.stage.addEventListener("pointerleave", () => this.read(null));
    this.stage.addEventListener("click", (event) => this.click(event));
    this.stage.addEventListener("keydown", (event) => this.key(event));
    this.stage.addEventListener("blur", () => this.read(null));
  }

  get width() {
    return this.stage.clientWidth;
  }

  // `marked` are the rows that a verdict names, `picked` those that are drawn as lines.
  draw(data, metric, theme, marked, picked) {
    Object.assign(this, { data, metric, theme, marked, picked });
    const { named } = data;
    this.layout = stripRows(
      named.ranks.map(([, , host]) => named.hosts[host]),
      TALL,
    );
    this.several = named.hosts.length > 1;
    this.range = colorRange(data.cells, metric.key);
    this.size();
    this.paint();
    this.showLegend();
    setAttribute(
      this.stage,
      "aria-label",
      `${metric.label} of ${rankCount(data.ranks)} over ${data.axisName}. ` +
        "Arrow keys read values, Enter plots a rank.",
    );
  }

  size() {
    const { width } = this;
    const head = this.several ? 14 : 0;
    this.head = head;
    const extra = head * this.layout.groups.length;
    const height = this.layout.total + extra + BOTTOM;
    const ratio = window.devicePixelRatio || 1;
    this.canvas.width = Math.max(1, Math.round(width * ratio));
    this.canvas.height = Math.round(height * ratio);
    this.canvas.style.height = `${height}px`;
    this.context = this.canvas.getContext("2d");
    this.context.setTransform(ratio, 0, 0, ratio, 0, 0);
    // The names of hosts stand above their rows.
    this.tops = this.layout.tops.map((top, row) => {
      const before = this.layout.groups.filter((group) => group.row <= row).length;
      return top + before * head;
    });
  }

  xOf(at) {
    const { begin, end } = this.data;
    return LEFT + ((this.width - LEFT) * (at - begin)) / (end - begin);
  }

  paint() {
    const { context: c, theme, layout, data } = this;
    c.clearRect(0, 0, this.width, layout.total + this.head * layout.groups.length + BOTTOM);
    c.font = `11px ${theme.font}`;
    const cells = Math.max(1, Math.floor((this.width - LEFT) / CELL_WIDTH));
    const xs = Array.from({ length: cells + 1 }, (_, i) =>
      Math.round(LEFT + ((this.width - LEFT) * i) / cells),
    );
    const high = layout.height > 6 ? layout.height - 1 : layout.height;
    const shades = this.shades();
    for (let row = 0; row < data.ranks; row += 1) {
      const line = data.strip(row);
      const top = this.tops[row];
      heatRow(line.xs, line.values, [data.begin, data.end], cells, line.xs).forEach(
        (value, cell) => {
          if (value === null || !this.range) return;
          c.fillStyle = shades[this.shadeOf(value)];
          c.fillRect(xs[cell], top, xs[cell + 1] - xs[cell], high);
        },
      );
    }
    this.paintNames(high);
    this.paintTicks();
  }

  shades() {
    const color = this.theme.palette[this.metric.color];
    return Array.from({ length: SHADES }, (_, i) =>
      withAlpha(color, 0.08 + (0.92 * i) / (SHADES - 1)),
    );
  }

  shadeOf(value) {
    const { low, high } = this.range;
    const share = Math.max(0, Math.min(1, (value - low) / (high - low)));
    return Math.round(share * (SHADES - 1));
  }

  paintNames(high) {
    const { context: c, theme, layout, data } = this;
    const every = layout.height >= LABEL_FROM ? 1 : layout.height >= 7 ? 2 : 4;
    c.textAlign = "right";
    c.textBaseline = "middle";
    for (let row = 0; row < data.ranks; row += 1) {
      const middle = this.tops[row] + high / 2;
      const strong = this.marked.has(row) || this.picked.has(row);
      const first = layout.groups.some((group) => group.row === row);
      const near =
        !strong && [...this.marked].some((other) => Math.abs(other - row) < 12 / layout.height);
      if (strong || ((row % every === 0 || first) && !near)) {
        c.fillStyle = strong ? theme.ink : theme.text;
        c.font = `${strong ? "600 " : ""}11px ${theme.font}`;
        c.fillText(String(data.named.ranks[row][1]), LEFT - 12, middle);
      }
      if (this.marked.has(row)) {
        c.fillStyle = theme.palette.orange;
        c.fillRect(LEFT - 7, this.tops[row], 4, high);
      }
    }
    if (!this.several) return;
    c.textAlign = "left";
    c.font = `11px ${theme.font}`;
    c.fillStyle = theme.text;
    for (const { host, row } of layout.groups) c.fillText(host, LEFT, this.tops[row] - 7);
  }

  paintTicks() {
    const { context: c, theme, data } = this;
    const { values, text } = data.ticks(this.width);
    const y = this.layout.total + this.head * this.layout.groups.length + BOTTOM - 6;
    c.font = `11px ${theme.font}`;
    c.fillStyle = theme.text;
    values.forEach((value, i) => {
      c.textAlign = this.xOf(value) < LEFT + 12 ? "left" : "center";
      const half = c.measureText(text[i]).width / 2;
      const x = this.xOf(value);
      if (i === 0 || x + half < this.width) c.fillText(text[i], x, y);
    });
  }

  showLegend() {
    this.legend.hidden = !this.range;
    if (!this.range) return;
    const { low, high, over } = this.range;
    const { unit, factor } = scaleFor(this.metric.unit, high);
    const text = (value) => short(value / factor);
    setText(this.low, text(low));
    setText(this.high, `${over ? "≥ " : ""}${text(high)}${unit ? ` ${unit}` : ""}`);
    const shades = this.shades();
    this.ramp.style.background = `linear-gradient(to right, ${shades[0]}, ${shades.at(-1)})`;
  }

  // --- reading single values ---

  at(event) {
    const box = this.stage.getBoundingClientRect();
    const row = rowAt({ tops: this.tops, height: this.layout.height }, event.clientY - box.top);
    const { begin, end } = this.data;
    const share = (event.clientX - box.left - LEFT) / (this.width - LEFT);
    if (row < 0 || share > 1) return null;
    return { row, x: begin + Math.max(0, share) * (end - begin) };
  }

  hover(event) {
    if (!this.data) return;
    const found = this.at(event);
    this.read(found && { row: found.row, column: Math.floor(found.x / this.data.width) });
  }

  click(event) {
    const found = this.data && this.at(event);
    if (found) this.pick(found.row);
  }

  key(event) {
    if (!this.data?.ranks) return;
    const last = this.data.cells.length - 1;
    const { row, column } = this.cursor ?? { row: 0, column: last };
    const moves = {
      ArrowUp: [-1, 0],
      ArrowDown: [1, 0],
      ArrowLeft: [0, -1],
      ArrowRight: [0, 1],
    };
    if (event.key === "Enter") this.pick(row);
    else if (event.key in moves) {
      const [down, right] = this.cursor ? moves[event.key] : [0, 0];
      this.read(
        {
          row: Math.max(0, Math.min(this.data.ranks - 1, row + down)),
          column: Math.max(0, Math.min(last, column + right)),
        },
        true,
      );
    } else return;
    event.preventDefault();
  }

  // Shows the value of a column of a rank; of the one before where the rank has none there.
  read(cursor, aloud = false) {
    this.cursor = cursor;
    this.tip.hidden = !cursor;
    this.point(cursor ? (cursor.column + 0.5) * this.data.width : null);
    if (!cursor) return;
    const { data, metric } = this;
    const [, rank, , place] = data.named.ranks[cursor.row];
    let { column } = cursor;
    while (column > 0 && !isNumber(data.cells[column]?.[cursor.row])) column -= 1;
    const value = data.cells[column]?.[cursor.row];
    const middle = (cursor.column + 0.5) * data.width;
    const device = place ? ` (${place})` : "";
    const told = isNumber(value) ? withUnit(value, metric.unit) : "no value";
    const text = `Rank ${rank}${device}, ${data.where(middle)}: ${told}`;
    setText(this.tip, text);
    if (aloud) setText(this.said, text);
    const room = this.width - this.tip.offsetWidth;
    const x = Math.max(0, Math.min(room, this.xOf(middle) + 10));
    this.tip.style.left = `${x}px`;
    this.tip.style.top = `${this.tops[cursor.row] + this.layout.height + 4}px`;
  }
}
