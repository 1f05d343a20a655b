// The section "Ranks" of a job: a chart and a table. It asks the server only while it is in view.

import { el, parts, say, setAttribute, setText } from "./dom.js";
import { Poller } from "./poll.js";
import { RankChart } from "./ranks_chart.js";
import { RankData, missingWords } from "./ranks_data.js";
import { RankTable } from "./ranks_table.js";

const PACE_MS = 1_000;
const MORE_PACE_MS = 20; // the answer could not hold all, or the server still reads
const ENDED_PACE_MS = 10_000;
const LAST_POLLS = 5; // after the end of rank 0: the others end too, and write their last steps
const PICKED_AT_ONCE = 8;

const SLOWEST_WAITS = "Time per step waiting for other ranks in backward; the slowest waits least";
// What the heatmap can show: label, unit, color and help by key; the order is the server's.
const METRIC_WORDS = {
  "perf/step_time": ["Step time", "s", "blue", "Time of a step, waiting for other ranks included"],
  "perf/comm_wait": ["Waiting for ranks", "s", "pink", SLOWEST_WAITS],
  "perf/data_wait": ["Data wait", "s", "orange", "Time per step waiting for the next batch"],
  "memory/allocated": ["Allocated", "B", "blue", "Tensor memory on the GPU, maximum per column"],
  "process/rss": ["Process memory", "B", "blue", "Memory of the process, maximum per column"],
  "gpu/util": ["GPU utilization", "%", "green", "Share of time the GPU is busy, all processes"],
  "train/loss": ["Loss", "", "blue", "Each rank's own loss, of its own samples"],
};
export const METRICS = Object.fromEntries(
  Object.entries(METRIC_WORDS).map(([key, [label, unit, color, help]]) => [
    key,
    { label, unit, color, help },
  ]),
);

export class RankSection {
  // `scene` has Plotly and the colors once they are known, and the axis of the charts.
  constructor(scene) {
    this.scene = scene;
    this.data = new RankData();
    this.seen = false;
    this.reset();
    this.chart = new RankChart((row) => (row === null ? this.showMean(false) : this.toggle(row)));
    this.table = new RankTable((row) => this.toggle(row));
    this.build();
    this.poller = new Poller({
      url: () => `/api/ranks?${new URLSearchParams(this.data.question())}`,
      pace: () => this.pace(),
      take: (answer) => this.take(answer),
      refused: (sentence) => say(this.trouble, sentence),
      trouble: (sentence) => say(this.trouble, sentence),
      idle: () => !this.seen || !this.data.run,
    });
    this.watch();
  }

  build() {
    const section = parts(`<section class="ss-ranks ss-card" data-testid="ranks" aria-label="Ranks"
      hidden>
      <header class="ss-card-head">
        <h3 ref="title">Ranks</h3><span class="ss-muted" ref="count"></span>
        <div class="ss-switch ss-modes" role="group" aria-label="Heatmap metric" ref="modes"></div>
      </header>
      <p class="ss-trouble" hidden ref="trouble"></p>
      <p class="ss-verdict" role="note" data-testid="rank-verdict" hidden ref="verdict">
        <span class="ss-verdict-text" ref="verdictText"></span> <span ref="verdictNext"></span>
      </p>
      <p class="ss-warning" role="note" data-testid="rank-missing" hidden ref="missing"></p>
      <p class="ss-rank-note" role="note" data-testid="rank-communication" hidden
        ref="communication"></p>
      <p class="ss-muted ss-empty" ref="reading">Loading ranks…</p>
      <div ref="filled" hidden>
        <div class="ss-rank-tools" ref="tools">
          <span class="ss-muted">Lines</span>
          <button type="button" class="ss-tool" title="Mean of all ranks" ref="meanButton">mean
          </button>
          <button type="button" class="ss-tool" ref="firstButton"></button>
        </div>
      </div>
    </section>`);
    Object.assign(this, section);
    this.meanButton.addEventListener("click", () => this.showMean(!this.mean));
    this.firstButton.addEventListener("click", () => this.toggle(0));
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

  // Shows the ranks of a run; null where it has one process only.
  show(run) {
    this.node.hidden = run === null;
    if (run === this.data.run) {
      this.follow();
      this.draw(); // the theme may be another
      return;
    }
    this.data.open(run);
    this.chart.read(null); // its row is of the run before
    this.data.chooseAxis(this.scene.store.axis);
    this.reset();
    this.table.open();
    this.reading.hidden = false;
    this.filled.hidden = true;
    setAttribute(this.node, "data-ready", null);
    if (run !== null && this.seen) this.poller.restart();
  }

  pace() {
    return this.polledEnded > LAST_POLLS ? ENDED_PACE_MS : PACE_MS;
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
    this.showModes();
    this.draw();
    if (!data.more) setAttribute(this.node, "data-ready", 1);
  }

  get metric() {
    const key = this.data.shown;
    return { key, ...(METRICS[key] ?? { label: key ?? "", unit: "", color: "blue" }) };
  }

  showModes() {
    const { metrics, shown } = this.data;
    const text = metrics.join();
    if (this.modesText !== text) {
      this.modesText = text;
      this.modes.replaceChildren(
        ...metrics.map((key) =>
          el(
            "button",
            {
              ...{ type: "button", "data-metric": key, title: METRICS[key]?.help ?? null },
              onclick: () => this.choose(key),
            },
            METRICS[key]?.label ?? key,
          ),
        ),
      );
    }
    for (const button of this.modes.children)
      setAttribute(button, "aria-pressed", button.dataset.metric === shown);
  }

  choose(metric) {
    if (metric === this.data.shown) return;
    this.data.choose(metric);
    this.poller.restart();
  }

  // The charts show another axis, or the same.
  follow() {
    if (this.scene.store.axis === this.data.axis) return;
    this.chart.read(null); // its place is of the axis before
    this.data.chooseAxis(this.scene.store.axis);
    setAttribute(this.node, "data-ready", null);
    if (this.data.run) this.poller.restart();
  }

  toggle(row) {
    if (!this.picked.delete(row)) {
      if (this.picked.size >= PICKED_AT_ONCE) this.picked.delete([...this.picked][0]);
      this.picked.add(row);
    }
    this.draw();
  }

  showMean(shown) {
    this.mean = shown;
    this.draw();
  }

  // The rows that a verdict names.
  get marked() {
    const { verdict } = this.data.answer ?? {};
    const named = new Set(verdict?.ranks);
    const rows = new Set();
    this.data.named?.ranks.forEach(([, rank], row) => named.has(rank) && rows.add(row));
    return rows;
  }

  draw() {
    const { data, scene } = this;
    const { Plotly, theme } = scene;
    if (!theme || !data.answer || !data.named || !this.node.clientWidth) return;
    const { marked, picked, metric } = this;
    const { verdict, communication } = data.answer;
    setText(this.count, `of ${data.named.world_size}`);
    this.count.hidden = data.ranks === data.named.world_size;
    setText(this.title, `Ranks: ${data.ranks}`);
    this.verdict.hidden = !verdict;
    setAttribute(this.verdict, "data-kind", verdict?.kind ?? null);
    setText(this.verdictText, verdict?.text ?? "");
    setText(this.verdictNext, verdict?.next ?? "");
    say(this.missing, missingWords(data.named));
    say(this.communication, communication);
    setAttribute(this.meanButton, "aria-pressed", this.mean);
    // Rank 0, or the first of a host that has a folder of its own.
    const first = `rank ${data.named.ranks[0][1]}`;
    setText(this.firstButton, first);
    setAttribute(this.firstButton, "title", `The line of ${first}, which the charts above show`);
    setAttribute(this.firstButton, "aria-pressed", picked.has(0));
    // Without a value there is nothing to draw; the table says what is known.
    const none = !data.metrics.length;
    for (const node of [this.chart.node, this.tools, this.modes]) node.hidden = none;
    if (!none && Plotly) this.chart.draw(scene, data, metric, marked, picked, this.mean);
    this.table.update(data, verdict, marked, picked);
  }

  close() {
    this.poller.close();
    this.inView.disconnect();
    this.sized.disconnect();
    this.chart.close();
  }
}
