// The Ranks tab of a distributed run: a chart and a table. It polls only while it is in view.

import { button, el, parts, render, setAttribute, setText, showText } from "./dom.js";
import { MISSING, counted, isNumber, scaleFor, short, suffix, withUnit } from "./format.js";
import { VerdictLine } from "./header.js";
import { heatTrace, maxCells } from "./card_kinds.js";
import { Poller } from "./poll.js";
import { RankData, colorRange, isKnown, sorted, stateWords } from "./ranks_data.js";
import { usualSort, wentWrong } from "./ranks_data.js";

const PACE_MS = 2_000;
const FIRST_PACE_MS = 200; // while the server reads the ranks
const ENDED_PACE_MS = 5_000; // for the last steps of the other ranks

const SLOWEST_WAITS = "Time per step waiting for other ranks in backward; the slowest waits least";
// The metrics of the heatmap: label, unit, color and help by key, in the server's order.
export const METRICS = {
  "perf/step_time": ["Step time", "s", "blue", "Time of a step, waiting for other ranks included"],
  "perf/comm_wait": ["Waiting for ranks", "s", "pink", SLOWEST_WAITS],
  "perf/data_wait": ["Data wait", "s", "orange", "Time per step waiting for the next batch"],
  "memory/allocated": ["Allocated", "B", "blue", "Tensor memory on the GPU, maximum per column"],
  "process/rss": ["Process memory", "B", "blue", "Memory of the process, maximum per column"],
  "gpu/util": ["GPU utilization", "%", "green", "Share of time the GPU is busy, all processes"],
  "train/loss": ["Loss", "", "blue", "Loss of each rank over its samples"],
};

const seconds = (value) => withUnit(value, "s");
const share = (value) => withUnit(value, "%");
const size = (value) => withUnit(value, "B");
const WAITS =
  "Share of the step spent in backward waiting for other ranks; the slowest waits least";

// Key, title, help, text of a value, true for numbers, true if hidden without values. The state is
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

class RankTable {
  constructor() {
    this.chosen = null; // {key, descending}, the user's choice
    const table = parts(`<div class="ss-scroll ss-rank-table" tabindex="0" role="region"
      aria-label="Table of the ranks" data-testid="rank-table"><table>
      <thead><tr ref="head"></tr></thead><tbody ref="body"></tbody></table></div>`);
    Object.assign(this, table);
  }

  sort(key) {
    const { key: now, descending } = this.order;
    this.chosen = { key, descending: now === key ? !descending : startsDescending(key) };
    this.update(this.data, this.verdict, this.marked);
  }

  update(data, verdict, marked) {
    Object.assign(this, { data, verdict, marked });
    const rows = data.rows();
    this.order = this.chosen ?? usualSort(verdict, rows);
    const shown = COLUMNS.filter(
      ([key, , , , , optional]) => !optional || rows.some((row) => isNumber(row[key])),
    );
    render(this.head, ...shown.map((each) => this.title(each)));
    const { key, descending } = this.order;
    render(this.body, ...sorted(rows, key, descending).map((row) => this.line(row, shown)));
  }

  title([key, title, help, , number]) {
    const down = this.order.key === key ? this.order.descending : null;
    const name =
      key === "memory" && this.data.answer.memory === "process" ? "Process memory" : title;
    const sort = down === null ? null : down ? "descending" : "ascending";
    const text = down === null ? name : `${name} ${down ? "↓" : "↑"}`;
    const press = button(() => this.sort(key), { title: help }, text);
    return el("th", { scope: "col", class: number ? "ss-figure" : null, "aria-sort": sort }, press);
  }

  line(row, columns) {
    const cells = columns.map(([key, , , text, number]) => {
      const attributes = { class: number ? "ss-figure" : null, "data-column": key };
      if (key === "state")
        Object.assign(attributes, { class: "ss-kind", title: row.ended?.reason });
      const known = isKnown(row[key]) ? () => text(row[key]) : () => MISSING;
      return el("td", attributes, key === "state" ? stateWords(row) : known());
    });
    const [named, tone] = [this.marked.has(row.row) || null, wentWrong(row) ? "bad" : null];
    return el("tr", { "data-rank": row.rank, "data-named": named, "data-tone": tone }, ...cells);
  }
}

// The heatmap, a row per rank. The pointer and the arrow keys read single values.
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

export class RankSection {
  // `scene` is the painter: Plotly, the theme, and the store with the shared axis.
  constructor(scene) {
    this.scene = scene;
    this.data = new RankData();
    this.seen = false;
    this.chart = new RankChart();
    this.table = new RankTable();
    this.verdict = new VerdictLine("rank-verdict");
    this.build();
    this.poller = new Poller({
      url: () => `/api/ranks?${new URLSearchParams(this.data.question())}`,
      pace: () => (this.data.live ? PACE_MS : ENDED_PACE_MS),
      take: (answer) => this.take(answer),
      trouble: (sentence) => showText(this.trouble, sentence),
      idle: () => !this.seen || !this.data.run,
    });
    this.watch();
  }

  build() {
    const section = parts(`<section class="ss-box ss-card ss-section ss-ranks" data-testid="ranks"
      aria-label="Ranks" hidden>
      <header class="ss-head">
        <h3 ref="title">Ranks</h3><span class="ss-muted" ref="count"></span>
        <div class="ss-switch ss-modes ss-end" role="group" aria-label="Heatmap metric"
          ref="modes"></div>
      </header>
      <p class="ss-warning" hidden ref="trouble"></p>
      <p class="ss-warning" role="note" data-testid="rank-missing" hidden ref="missing"></p>
      <p class="ss-muted" ref="reading">Loading ranks…</p>
      <div ref="filled" hidden></div>
    </section>`);
    Object.assign(this, section);
    this.trouble.after(this.verdict.node);
    this.filled.append(this.chart.node, this.table.node);
  }

  watch() {
    this.inView = new IntersectionObserver(([entry]) => {
      const came = entry.isIntersecting && !this.seen;
      this.seen = entry.isIntersecting;
      if (came && this.data.run) this.poller.now();
    });
    this.inView.observe(this.node);
    this.sized = new ResizeObserver(() => this.draw());
    this.sized.observe(this.node);
  }

  show(run) {
    this.node.hidden = run === null;
    if (run === this.data.run) {
      this.follow();
      this.draw(); // the theme may have changed
      return;
    }
    this.data.open(run);
    this.table.chosen = null;
    this.reading.hidden = false;
    this.filled.hidden = true;
    this.restart();
  }

  restart() {
    this.chart.read(null); // the cursor was on the old run or axis
    this.data.chooseAxis(this.scene.store.axis);
    setAttribute(this.node, "data-ready", null);
    if (this.data.run && this.seen) this.poller.restart();
  }

  follow() {
    if (this.scene.store.axis !== this.data.axis) this.restart();
  }

  take(answer) {
    const { data } = this;
    if (answer.run !== data.run) return;
    data.take(answer);
    if (!data.answer) {
      this.poller.plan(FIRST_PACE_MS);
      return;
    }
    this.reading.hidden = true;
    this.filled.hidden = false;
    this.draw();
    setAttribute(this.node, "data-ready", 1);
  }

  choose(metric) {
    if (metric === this.data.shown) return;
    this.data.choose(metric);
    this.poller.restart();
  }

  get marked() {
    const named = new Set(this.data.answer.verdict?.ranks);
    const rows = this.data.answer.ranks.map(([rank], row) => (named.has(rank) ? row : null));
    return new Set(rows.filter((row) => row !== null));
  }

  draw() {
    const { data, scene } = this;
    const { Plotly, theme } = scene;
    if (!theme || !data.answer || !this.node.clientWidth) return;
    const { marked } = this;
    const { verdict, world_size: all } = data.answer;
    setText(this.title, `Ranks: ${data.ranks}`);
    showText(this.count, data.ranks === all ? "" : `of ${all}`);
    this.verdict.update({ answer: { verdict } });
    showText(this.missing, data.answer.missing_text);
    this.drawModes();
    // Without a value only the table is shown.
    const none = !data.metrics.length;
    for (const node of [this.chart.node, this.modes]) node.hidden = none;
    if (data.shown && Plotly) {
      const [label, unit, color] = METRICS[data.shown];
      this.chart.draw(scene, data, { key: data.shown, label, unit, color }, marked);
    }
    this.table.update(data, verdict, marked);
  }

  drawModes() {
    const mode = (key) => {
      const [label, , , help] = METRICS[key];
      const attributes = { title: help, "aria-pressed": key === this.data.shown };
      return button(() => this.choose(key), attributes, label);
    };
    render(this.modes, ...this.data.metrics.map(mode));
  }

  close() {
    this.poller.close();
    this.inView.disconnect();
    this.sized.disconnect();
    this.chart.close();
  }
}
