// The section "Ranks" of a job: strips of heat, lines of picked ranks, a table. It asks the server
// only while it is in view.

import { el, setAttribute, setText } from "./dom.js";
import { Poller } from "./poll.js";
import { RankData, missingWords } from "./ranks_data.js";
import { RankLines } from "./ranks_lines.js";
import { RankStrips } from "./ranks_strips.js";
import { RankTable } from "./ranks_table.js";

const PACE_MS = 1_000;
const MORE_PACE_MS = 20; // the answer could not hold all, or the server still reads
const ENDED_PACE_MS = 10_000;
const LAST_POLLS = 5; // after the end of rank 0: the others end too, and write their last steps
const PICKED_AT_ONCE = 8;

// What the strips can show; the order is the server's.
export const METRICS = {
  "perf/step_time": {
    ...{ label: "Step time", unit: "s", color: "blue" },
    help: "Time of a step, waiting for other ranks included",
  },
  "perf/comm_wait": {
    ...{ label: "Waiting for ranks", unit: "s", color: "pink" },
    help: "Time per step spent in backward waiting for other ranks; the slowest rank waits least",
  },
  "perf/data_wait": {
    ...{ label: "Data wait", unit: "s", color: "orange" },
    help: "Time per step spent waiting for the next batch",
  },
  "memory/allocated": {
    ...{ label: "Allocated", unit: "B", color: "blue" },
    help: "Tensor memory on the GPU, maximum per column",
  },
  "process/rss": {
    ...{ label: "Process memory", unit: "B", color: "blue" },
    help: "Memory of the process: the highest value of each column",
  },
  "gpu/util": {
    ...{ label: "GPU utilization", unit: "%", color: "green" },
    help: "Share of time the GPU is busy, for all its processes",
  },
  "train/loss": {
    ...{ label: "Loss", unit: "", color: "blue" },
    help: "Each rank's own loss, of its own samples",
  },
};

export class RankSection {
  // `theme()` gives the page's colors, null before they are known; `axis()` that of the charts.
  constructor(theme, axis) {
    this.theme = theme;
    this.axis = axis;
    this.data = new RankData();
    this.seen = false;
    this.picked = new Set();
    this.mean = true;
    this.polledEnded = 0;
    this.strips = new RankStrips(
      (row) => this.toggle(row),
      (x) => this.lines.point(x),
    );
    this.lines = new RankLines((row) => (row === null ? this.showMean(false) : this.toggle(row)));
    this.table = new RankTable((row) => this.toggle(row));
    this.build();
    this.poller = new Poller({
      url: () => `/api/ranks?${new URLSearchParams(this.data.question())}`,
      pace: () => this.pace(),
      take: (answer) => this.take(answer),
      refused: (sentence) => this.setTrouble(sentence),
      trouble: (sentence) => this.setTrouble(sentence),
      idle: () => !this.seen || !this.data.run,
    });
    this.watch();
  }

  build() {
    this.title = el("h3", {}, "Ranks");
    this.count = el("span", { class: "ss-muted" });
    this.modes = el("div", {
      class: "ss-switch ss-modes",
      role: "group",
      "aria-label": "Heatmap metric",
    });
    this.meanButton = el(
      "button",
      {
        type: "button",
        class: "ss-tool",
        title: "Mean of all ranks",
        onclick: () => this.showMean(!this.mean),
      },
      "mean",
    );
    this.firstButton = el("button", {
      type: "button",
      class: "ss-tool",
      onclick: () => this.toggle(0),
    });
    this.trouble = el("p", { class: "ss-trouble", hidden: "" });
    this.verdict = el(
      "p",
      { class: "ss-verdict", role: "note", "data-testid": "rank-verdict", hidden: "" },
      el("span", { class: "ss-verdict-text" }),
      " ",
      el("span", {}),
    );
    this.missing = el("p", {
      class: "ss-warning",
      role: "note",
      "data-testid": "rank-missing",
      hidden: "",
    });
    this.communication = el("p", {
      class: "ss-rank-note",
      role: "note",
      "data-testid": "rank-communication",
      hidden: "",
    });
    this.reading = el("p", { class: "ss-muted ss-empty" }, "Loading ranks…");
    const head = el(
      "header",
      { class: "ss-card-head ss-rank-head" },
      this.title,
      this.count,
      this.modes,
      this.strips.legend,
    );
    this.lineTools = el(
      "div",
      { class: "ss-rank-tools" },
      el("span", { class: "ss-muted" }, "Lines"),
      this.meanButton,
      this.firstButton,
    );
    this.filled = el(
      "div",
      { hidden: "" },
      this.strips.node,
      this.lineTools,
      this.lines.node,
      this.table.node,
    );
    this.node = el(
      "section",
      { class: "ss-ranks ss-card", "data-testid": "ranks", "aria-label": "Ranks", hidden: "" },
      head,
      this.trouble,
      this.verdict,
      this.missing,
      this.communication,
      this.reading,
      this.filled,
    );
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
    this.data.chooseAxis(this.axis());
    this.picked = new Set();
    this.mean = true;
    this.polledEnded = 0;
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

  setTrouble(sentence) {
    this.trouble.hidden = !sentence;
    setText(this.trouble, sentence || "");
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
    if (this.axis() === this.data.axis) return;
    this.strips.read(null); // its column is of the axis before
    this.data.chooseAxis(this.axis());
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
    const { data } = this;
    const theme = this.theme();
    if (!theme || !data.answer || !data.named || !this.node.clientWidth) return;
    const { marked, picked, metric } = this;
    const { verdict, communication } = data.answer;
    setText(this.count, `of ${data.named.world_size}`);
    this.count.hidden = data.ranks === data.named.world_size;
    setText(this.title, `Ranks: ${data.ranks}`);
    this.verdict.hidden = !verdict;
    setAttribute(this.verdict, "data-kind", verdict?.kind ?? null);
    setText(this.verdict.children[0], verdict?.text ?? "");
    setText(this.verdict.children[1], verdict?.next ?? "");
    const absent = missingWords(data.named);
    this.missing.hidden = !absent;
    setText(this.missing, absent);
    this.communication.hidden = !communication;
    setText(this.communication, communication ?? "");
    setAttribute(this.meanButton, "aria-pressed", this.mean);
    // Rank 0, or the first of a host that has a folder of its own.
    const first = `rank ${data.named.ranks[0][1]}`;
    setText(this.firstButton, first);
    setAttribute(this.firstButton, "title", `The line of ${first}, which the charts above show`);
    setAttribute(this.firstButton, "aria-pressed", picked.has(0));
    this.drawMetric(metric, theme, marked, picked);
    this.table.update(data, verdict, marked, picked);
  }

  // Without a value there is nothing to draw; the table says what is known.
  drawMetric(metric, theme, marked, picked) {
    const none = !this.data.metrics.length;
    for (const node of [this.strips.node, this.lineTools, this.lines.node, this.modes])
      node.hidden = none;
    if (none) this.strips.legend.hidden = true;
    else {
      this.strips.draw(this.data, metric, theme, marked, picked);
      this.lines.draw(this.data, metric, theme, picked, this.mean);
    }
  }

  close() {
    this.poller.close();
    this.inView.disconnect();
    this.sized.disconnect();
  }
}
