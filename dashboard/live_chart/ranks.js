// The Ranks tab of a distributed run: a chart and a table. It polls only while it is in view.

import { button, parts, render, setAttribute, setText, showText } from "./dom.js";
import { Poller } from "./poll.js";
import { RankChart } from "./ranks_chart.js";
import { RankData, missingWords } from "./ranks_data.js";
import { RankTable } from "./ranks_table.js";

const PACE_MS = 1_000;
const MORE_PACE_MS = 20; // the answer was incomplete, or the server still reads
const ENDED_PACE_MS = 10_000;
const LAST_POLLS = 5; // after the end of rank 0, for the last steps of the other ranks
const MAX_PICKED = 8;

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

export class RankSection {
  // `scene` is the painter: Plotly, the theme, and the store with the shared axis.
  constructor(scene) {
    this.scene = scene;
    this.data = new RankData();
    this.seen = false;
    this.reset();
    this.chart = new RankChart((row) => (row === null ? this.showMean(false) : this.toggle(row)));
    this.table = new RankTable((row) => this.toggle(row));
    this.build();
    const trouble = (sentence) => showText(this.trouble, sentence);
    this.poller = new Poller({
      url: () => `/api/ranks?${new URLSearchParams(this.data.question())}`,
      pace: () => (this.polledEnded > LAST_POLLS ? ENDED_PACE_MS : PACE_MS),
      take: (answer) => this.take(answer),
      refused: trouble,
      trouble,
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
      <p class="ss-verdict" role="note" data-testid="rank-verdict" hidden ref="verdict">
        <strong ref="verdictText"></strong> <span ref="verdictNext"></span>
      </p>
      <p class="ss-warning" role="note" data-testid="rank-missing" hidden ref="missing"></p>
      <p class="ss-muted" role="note" data-testid="rank-communication" hidden
        ref="communication"></p>
      <p class="ss-muted" ref="reading">Loading ranks…</p>
      <div ref="filled" hidden>
        <div class="ss-row ss-rank-tools" ref="tools"><span class="ss-muted">Lines</span></div>
      </div>
    </section>`);
    Object.assign(this, section);
    const mean = { class: "ss-tool", title: "Mean of all ranks" };
    this.meanButton = button(() => this.showMean(!this.mean), mean, "mean");
    this.firstButton = button(() => this.toggle(0), { class: "ss-tool" });
    this.tools.append(this.meanButton, this.firstButton);
    this.filled.prepend(this.chart.node);
    this.filled.append(this.table.node);
  }

  reset() {
    this.picked = new Set();
    this.mean = true;
    this.polledEnded = 0;
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
    this.reset();
    this.table.chosen = null;
    this.reading.hidden = false;
    this.filled.hidden = true;
    this.restart();
  }

  // Requests the data of another run or axis.
  restart() {
    this.chart.read(null); // the cursor was on the old run or axis
    this.data.chooseAxis(this.scene.store.axis);
    setAttribute(this.node, "data-ready", null);
    if (this.data.run && this.seen) this.poller.restart();
  }

  // Follows the axis of the charts.
  follow() {
    if (this.scene.store.axis !== this.data.axis) this.restart();
  }

  take(answer) {
    const { data } = this;
    if (answer.run !== data.run) return;
    data.take(answer);
    this.polledEnded = data.live ? 0 : this.polledEnded + 1;
    if (data.more || data.unread) this.poller.plan(MORE_PACE_MS);
    if (data.unread) setText(this.reading, `Reading the ranks… ${data.unread} to go.`);
    if (!data.answer || !data.named) return;
    this.reading.hidden = true;
    this.filled.hidden = false;
    this.draw();
    if (!data.more) setAttribute(this.node, "data-ready", 1);
  }

  choose(metric) {
    if (metric === this.data.shown) return;
    this.data.choose(metric);
    this.poller.restart();
  }

  toggle(row) {
    if (!this.picked.delete(row)) {
      if (this.picked.size >= MAX_PICKED) this.picked.delete([...this.picked][0]);
      this.picked.add(row);
    }
    this.draw();
  }

  showMean(shown) {
    this.mean = shown;
    this.draw();
  }

  // The rows that the diagnosis names.
  get marked() {
    const named = new Set(this.data.answer.verdict?.ranks);
    const rows = this.data.named.ranks.map(([, rank], row) => (named.has(rank) ? row : null));
    return new Set(rows.filter((row) => row !== null));
  }

  draw() {
    const { data, scene, picked } = this;
    const { Plotly, theme } = scene;
    if (!theme || !data.answer || !data.named || !this.node.clientWidth) return;
    const { marked } = this;
    const { verdict, communication } = data.answer;
    setText(this.title, `Ranks: ${data.ranks}`);
    const { world_size: all, ranks } = data.named;
    showText(this.count, data.ranks === all ? "" : `of ${all}`);
    this.verdict.hidden = !verdict;
    setAttribute(this.verdict, "data-kind", verdict?.kind ?? null);
    setText(this.verdictText, verdict?.text ?? "");
    setText(this.verdictNext, verdict?.next ?? "");
    showText(this.missing, missingWords(data.named));
    showText(this.communication, communication);
    setAttribute(this.meanButton, "aria-pressed", this.mean);
    // Rank 0, or the first rank of a host with its own run folder.
    const first = `rank ${ranks[0][1]}`;
    setText(this.firstButton, first);
    setAttribute(
      this.firstButton,
      "title",
      `The line of ${first}, as in the charts of the Overview`,
    );
    setAttribute(this.firstButton, "aria-pressed", picked.has(0));
    this.drawModes();
    // Without a value only the table is shown.
    const none = !data.metrics.length;
    for (const node of [this.chart.node, this.tools, this.modes]) node.hidden = none;
    const [label, unit, color] = METRICS[data.shown] ?? [data.shown ?? "", "", "blue"];
    const metric = { key: data.shown, label, unit, color };
    if (!none && Plotly) this.chart.draw(scene, data, metric, marked, picked, this.mean);
    this.table.update(data, verdict, marked, picked);
  }

  drawModes() {
    const mode = (key) => {
      const [label, , , help] = METRICS[key] ?? [key];
      const attributes = {
        "data-metric": key,
        title: help,
        "aria-pressed": key === this.data.shown,
      };
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
