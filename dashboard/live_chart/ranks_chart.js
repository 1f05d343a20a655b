// One Plotly chart of a distributed run: a heatmap with a row per rank, and below it the lines of picked
// ranks and of their mean. The pointer and the arrow keys read single values.

import { parts, setAttribute, setText } from "./dom.js";
import { isNumber, scaleFor, short, suffix, withUnit } from "./format.js";
import { heatTrace, maxCells } from "./heat.js";
import { bisect, linePoints } from "./lines.js";
import { colorRange } from "./ranks_data.js";

const MARGIN = { l: 58, r: 74, t: 6, b: 22 };
const HEAT_HEIGHT_PX = 384; // shared by the rows
const [MIN_ROW_PX, MAX_ROW_PX] = [5, 26];
const LINES_HEIGHT_PX = 150;
const GAP_PX = 34; // for the legend of the lines
const LABEL_HEIGHT_PX = 12; // of a row's number
const MIN_WIDTH_PX = 200;
const MAX_HOST_CHARACTERS = 10;
const MOVES = { ArrowUp: [-1, 0], ArrowDown: [1, 0], ArrowLeft: [0, -1], ArrowRight: [0, 1] };
const HINT = "Select ranks in the table, or click a heatmap row, to plot them.";

// Returns the lines as {row, label, color, xs, values}: the picked ranks, then the mean.
export function rankLines(data, picked, mean) {
  const lines = [...picked].map((row, i) => ({
    row,
    label: `rank ${data.answer.ranks[row][1]}`,
    color: `gpu${i % 8}`,
    ...data.line(row),
  }));
  return mean ? [...lines, { row: null, label: "mean", color: "blue", ...data.meanLine() }] : lines;
}

// Returns the vertical range of the lines, from zero if that is near. Of many values the slowest 1% (the
// first steps) are ignored if they are far above the others.
export function lineRange(lines) {
  const values = lines.flatMap((line) => line.values).sort((a, b) => a - b);
  if (!values.length) return [0, 1];
  const [low, most] = [values[0], values.at(-1)];
  const usual = values.length > 40 ? values[Math.floor(0.99 * (values.length - 1))] : most;
  const high = most - low > 2 * (usual - low || Math.abs(usual)) ? usual : most;
  const from = low >= 0 && low < 0.5 * high ? 0 : low;
  const margin = 0.05 * (high - from || Math.abs(high) || 1);
  return [from && from - margin, high + margin];
}

// Returns the value of the column of a line nearest to x; null if it is further than `near`.
export function lineValueAt({ xs, values }, x, near) {
  if (!xs.length) return null;
  const after = Math.min(bisect(xs, x), xs.length - 1);
  const at = after > 0 && x - xs[after - 1] < xs[after] - x ? after - 1 : after;
  return Math.abs(xs[at] - x) <= near ? values[at] : null;
}

// Returns the rank numbers of the rows as {row, text}, as many as fit; `marked` rows are bold. With
// several hosts the first rank of each has the host's name.
export function rowLabels({ ranks, hosts }, height, marked) {
  const every = Math.ceil(LABEL_HEIGHT_PX / height);
  const labels = ranks.map(([, rank, host], row) => {
    const first = hosts.length > 1 && (row === 0 || ranks[row - 1][2] !== host);
    if (!first && !marked.has(row) && row % every) return null;
    const named = first ? hosts[host].slice(0, MAX_HOST_CHARACTERS).replaceAll("<", "&lt;") : "";
    const text = `${named} ${rank}`.trim();
    return { row, text: marked.has(row) ? `<b>▸ ${text}</b>` : text };
  });
  return labels.filter(Boolean);
}

export class RankChart {
  // `toggle(row)` is called for a rank's row or its line in the legend, with null for the mean.
  constructor(toggle) {
    this.toggle = toggle;
    const chart = parts(`<div class="ss-rank-chart" data-testid="rank-chart" tabindex="0"
      role="application" aria-roledescription="heatmap">
      <div ref="plot"></div>
      <p class="ss-muted" data-testid="rank-reading" aria-live="polite" ref="reading"></p>
    </div>`);
    Object.assign(this, chart);
    this.cursor = null; // {row, x} of the shown value; row is null on the lines
    this.node.addEventListener("keydown", (event) => this.press(event));
    this.node.addEventListener("blur", () => this.read(null));
  }

  // `marked` are the rows that the diagnosis names, `picked` the rows with a line.
  draw({ Plotly, theme }, data, metric, marked, picked, mean) {
    const first = !this.data;
    Object.assign(this, { Plotly, theme, data, metric });
    this.lines = rankLines(data, picked, mean);
    Plotly.react(this.plot, this.traces(), this.layout(marked), { displayModeBar: false });
    if (first) this.listen();
    const names = this.lines.map(({ label }) => label).join(", ") || "no line";
    const label = `${metric.label} over ${data.axisName}: ${names}.`;
    setAttribute(this.node, "aria-label", `${label} Arrow keys read values, Enter plots a rank.`);
    this.read(this.cursor);
  }

  listen() {
    this.plot.on("plotly_hover", ({ points: [{ curveNumber, pointNumber, x }], event }) => {
      if (event) this.read({ row: curveNumber ? null : pointNumber[0], x });
    });
    this.plot.on("plotly_unhover", () => this.read(null));
    this.plot.on("plotly_click", ({ points: [{ curveNumber, pointNumber }] }) => {
      if (curveNumber === 0) this.toggle(pointNumber[0]);
    });
    this.plot.on("plotly_legendclick", ({ curveNumber }) => {
      this.toggle(this.lines[curveNumber - 1].row);
      return false;
    });
  }

  get width() {
    return Math.max(MIN_WIDTH_PX, this.node.clientWidth);
  }

  get rowHeight() {
    return Math.max(MIN_ROW_PX, Math.min(MAX_ROW_PX, Math.floor(HEAT_HEIGHT_PX / this.data.ranks)));
  }

  traces() {
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
    const color = theme.palette[metric.color];
    const heat = {
      ...heatTrace(strips, [begin, end], most, [low, high], color),
      hoverinfo: "none",
      colorbar: {
        ...{ thickness: 8, outlinewidth: 0, x: 1, y: 1, yanchor: "top", lenmode: "pixels" },
        ...{ len: Math.max(60, this.rowHeight * data.ranks), ypad: 4 },
        ...{ tickvals: [low, high], ticktext: [short(low / factor), highest] },
      },
    };
    const lines = this.lines.map(({ row, label, color, xs, values }) => ({
      ...{ type: "scatter", mode: "lines", yaxis: "y2", hoverinfo: "none", showlegend: true },
      ...linePoints(xs, values, null, 1, xs),
      name: `${label} ${isNumber(values.at(-1)) ? withUnit(values.at(-1), metric.unit) : ""}`,
      line: { color: theme.palette[color], width: row === null ? 2.2 : 1.3 },
    }));
    return [heat, ...lines];
  }

  layout(marked) {
    const { data, theme, metric } = this;
    const heat = this.rowHeight * data.ranks;
    const plot = heat + GAP_PX + LINES_HEIGHT_PX;
    const ticks = data.ticks(this.width);
    const labels = rowLabels(data.answer, this.rowHeight, marked);
    const [low, high] = lineRange(this.lines);
    const { unit, factor } = scaleFor(metric.unit, Math.max(Math.abs(low), Math.abs(high)));
    const levels = Array.from({ length: 4 }, (_, i) => low + ((high - low) * i) / 3);
    return {
      ...{ width: this.width, height: plot + MARGIN.t + MARGIN.b, margin: MARGIN },
      ...{ hovermode: "x", dragmode: false, showlegend: true, hoverdistance: 100 },
      template: theme.template,
      legend: { orientation: "h", x: 0, y: (LINES_HEIGHT_PX + 2) / plot, yanchor: "bottom" },
      xaxis: {
        ...{ anchor: "y2", range: [data.begin, data.end], showgrid: false },
        ...{ tickvals: ticks.values, ticktext: ticks.text },
        ...{ showspikes: true, spikemode: "across", spikethickness: 1, spikecolor: theme.line },
      },
      yaxis: {
        ...{ domain: [1 - heat / plot, 1], range: [data.ranks - 0.5, -0.5], showgrid: false },
        ...{ tickvals: labels.map(({ row }) => row), ticktext: labels.map(({ text }) => text) },
      },
      yaxis2: {
        ...{ domain: [0, LINES_HEIGHT_PX / plot], range: [low, high], tickvals: levels },
        ticktext: levels.map((level) => short(level / factor) + suffix(unit)),
      },
    };
  }

  // --- single values ---

  press(event) {
    if (!this.data?.ranks) return;
    const { width, cells, ranks } = this.data;
    const last = cells.length - 1;
    const row = this.cursor?.row ?? 0;
    const column = this.cursor ? Math.floor(this.cursor.x / width) : last;
    if (event.key === "Enter") this.toggle(row);
    else if (event.key in MOVES) {
      const [down, right] = this.cursor ? MOVES[event.key] : [0, 0];
      const clamp = (value, most) => Math.max(0, Math.min(most, value));
      this.read({
        row: clamp(row + down, ranks - 1),
        x: (clamp(column + right, last) + 0.5) * width,
      });
    } else return;
    event.preventDefault();
  }

  // Shows the value of a rank or of the lines at the cursor; a hint without a cursor.
  read(cursor) {
    this.cursor = cursor;
    if (!this.data) return;
    setText(this.reading, cursor ? this.words(cursor) : this.lines.length ? "" : HINT);
  }

  // Returns the text of a cursor. A rank without a value at `x` has the value of the column before.
  words({ row, x }) {
    const { data, metric } = this;
    if (row === null) {
      const near = Math.max(2 * data.width, 3);
      const values = this.lines.map((line) => {
        const value = lineValueAt(line, x, near);
        return `${line.label} ${isNumber(value) ? withUnit(value, metric.unit) : "no value"}`;
      });
      return `${data.where(x)}: ${values.join(", ")}`;
    }
    const [, rank, , place] = data.answer.ranks[row];
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
