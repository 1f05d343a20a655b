// The heatmap of a distributed run: a row per rank. The pointer and the arrow keys read single values.

import { parts, setAttribute, setText } from "./dom.js";
import { isNumber, scaleFor, short, suffix, withUnit } from "./format.js";
import { heatTrace, maxCells } from "./heat.js";
import { colorRange } from "./ranks_data.js";

const MARGIN = { l: 44, r: 74, t: 6, b: 22 };
const HEAT_HEIGHT_PX = 384; // shared by the rows
const [MIN_ROW_PX, MAX_ROW_PX] = [5, 26];
const LABEL_HEIGHT_PX = 12; // of a row's number
const MIN_WIDTH_PX = 200;
const MOVES = { ArrowUp: [-1, 0], ArrowDown: [1, 0], ArrowLeft: [0, -1], ArrowRight: [0, 1] };

// Returns the rank numbers of the rows as {row, text}, as many as fit; `marked` rows are bold.
export function rowLabels(ranks, height, marked) {
  const every = Math.ceil(LABEL_HEIGHT_PX / height);
  const labels = ranks.map(([rank], row) => ({
    row,
    text: marked.has(row) ? `<b>▸ ${rank}</b>` : String(rank),
  }));
  return labels.filter(({ row }) => marked.has(row) || row % every === 0);
}

export class RankChart {
  constructor() {
    const chart = parts(`<div class="ss-rank-chart" data-testid="rank-chart" tabindex="0"
      role="application" aria-roledescription="heatmap">
      <div ref="plot"></div>
      <p class="ss-muted" data-testid="rank-reading" aria-live="polite" ref="reading"></p>
    </div>`);
    Object.assign(this, chart);
    this.cursor = null; // {row, x} of the shown value
    this.node.addEventListener("keydown", (event) => this.press(event));
    this.node.addEventListener("blur", () => this.read(null));
  }

  draw({ Plotly, theme }, data, metric, marked) {
    const first = !this.data;
    Object.assign(this, { Plotly, theme, data, metric });
    Plotly.react(this.plot, [this.heat()], this.layout(marked), { displayModeBar: false });
    if (first) this.listen();
    const label = `${metric.label} over ${data.axisName}. Arrow keys read values.`;
    setAttribute(this.node, "aria-label", label);
    this.read(this.cursor);
  }

  listen() {
    this.plot.on("plotly_hover", ({ points: [{ pointNumber, x }] }) =>
      this.read({ row: pointNumber[0], x }),
    );
    this.plot.on("plotly_unhover", () => this.read(null));
  }

  get width() {
    return Math.max(MIN_WIDTH_PX, this.node.clientWidth);
  }

  get rowHeight() {
    return Math.max(MIN_ROW_PX, Math.min(MAX_ROW_PX, Math.floor(HEAT_HEIGHT_PX / this.data.ranks)));
  }

  heat() {
    const { data, metric, theme } = this;
    const { begin, end } = data;
    const most = Math.min(
      maxCells(this.width - MARGIN.l - MARGIN.r),
      Math.ceil((end - begin) / data.width),
    );
    const { low, high, over } = colorRange(data.cells, metric.key) ?? { low: 0, high: 1 };
    const { unit, factor } = scaleFor(metric.unit, high);
    const strips = data.answer.ranks.map((_, row) => data.strip(row));
    const highest = `${over ? "≥ " : ""}${short(high / factor)}${suffix(unit)}`;
    return {
      ...heatTrace(strips, [begin, end], most, [low, high], theme.palette[metric.color]),
      hoverinfo: "none",
      colorbar: {
        ...{ thickness: 8, outlinewidth: 0, x: 1, y: 1, yanchor: "top", lenmode: "pixels" },
        ...{ len: Math.max(60, this.rowHeight * data.ranks), ypad: 4 },
        ...{ tickvals: [low, high], ticktext: [short(low / factor), highest] },
      },
    };
  }

  layout(marked) {
    const { data, theme } = this;
    const ticks = data.ticks(this.width);
    const labels = rowLabels(data.answer.ranks, this.rowHeight, marked);
    return {
      ...{ width: this.width, height: this.rowHeight * data.ranks + MARGIN.t + MARGIN.b },
      ...{ margin: MARGIN, hovermode: "closest", dragmode: false, template: theme.template },
      xaxis: {
        ...{ range: [data.begin, data.end], showgrid: false },
        ...{ tickvals: ticks.values, ticktext: ticks.text },
      },
      yaxis: {
        ...{ range: [data.ranks - 0.5, -0.5], showgrid: false },
        ...{ tickvals: labels.map(({ row }) => row), ticktext: labels.map(({ text }) => text) },
      },
    };
  }

  press(event) {
    if (!this.data?.ranks || !(event.key in MOVES)) return;
    event.preventDefault();
    const { width, cells, ranks } = this.data;
    const last = cells.length - 1;
    const { row, x } = this.cursor ?? { row: 0, x: last * width };
    const [down, right] = this.cursor ? MOVES[event.key] : [0, 0];
    const clamp = (value, most) => Math.max(0, Math.min(most, value));
    const column = clamp(Math.floor(x / width) + right, last);
    this.read({ row: clamp(row + down, ranks - 1), x: (column + 0.5) * width });
  }

  read(cursor) {
    this.cursor = cursor;
    if (this.data) setText(this.reading, cursor ? this.words(cursor) : "");
  }

  // Returns the text of a cursor. A rank without a value at `x` has the value of the column before.
  words({ row, x }) {
    const { data, metric } = this;
    const [rank, , place] = data.answer.ranks[row];
    let column = Math.floor(x / data.width);
    while (column > 0 && !isNumber(data.cells[column]?.[row])) column -= 1;
    const value = data.cells[column]?.[row];
    const words = isNumber(value) ? withUnit(value, metric.unit) : "no value";
    return `Rank ${rank}${place ? ` (${place})` : ""}, ${data.where(x)}: ${words}`;
  }

  close() {
    if (this.Plotly) this.Plotly.purge(this.plot);
  }
}
