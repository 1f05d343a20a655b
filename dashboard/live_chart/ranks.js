// The Ranks tab of a distributed run: a chart and a table. It polls only while it is in view.

import { button, el, parts, render, setAttribute, setText, showText } from "./dom.js";
import { MISSING, counted, isNumber, percent, withUnit } from "./format.js";
import { VerdictLine } from "./header.js";
import { Poller } from "./poll.js";
import { RankChart } from "./ranks_chart.js";
import { RankData, isKnown, sorted, stateWords } from "./ranks_data.js";
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
const share = (value) => (isNumber(value) ? percent(value) : MISSING);
const size = (value) => (isNumber(value) ? withUnit(value, "B") : MISSING);
const WAITS =
  "Share of the step spent in backward waiting for other ranks; the slowest waits least";

// Key, title, help, text of a value, true for numbers, true if hidden without values.
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

// The table is sortable by each column.
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
    return el(
      "th",
      { scope: "col", class: number ? "ss-figure" : null, "aria-sort": sort },
      button(() => this.sort(key), { title: help }, text),
    );
  }

  line(row, columns) {
    const cells = columns.map(([key, , , text, number]) => {
      const attributes = { class: number ? "ss-figure" : null, "data-column": key };
      if (key === "state")
        Object.assign(attributes, { class: "ss-kind", title: row.ended?.reason });
      const known = isKnown(row[key]) ? () => text(row[key]) : () => MISSING;
      return el("td", attributes, key === "state" ? stateWords(row) : known());
    });
    return el(
      "tr",
      {
        "data-rank": row.rank,
        "data-named": this.marked.has(row.row) || null,
        "data-tone": wentWrong(row) ? "bad" : null,
      },
      ...cells,
    );
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

  // Shows the ranks of a run; null hides the section.
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
