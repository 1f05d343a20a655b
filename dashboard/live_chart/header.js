// Everything above the charts: status, acknowledgement, progress, number tiles.

const STATUSES = {
  pending: ["○", "Pending"],
  running: ["●", "Running"],
  paused: ["Ⅱ", "Paused"],
  finished: ["✓", "Finished"],
  stopped: ["■", "Stopped"],
  failed: ["✕", "Failed"],
  crashed: ["!", "Crashed"],
};
const ENDED = new Set(["finished", "stopped", "failed", "crashed"]);
const SPARK_POINTS = 60;

class Tile {
  constructor(spec) {
    this.spec = spec;
    this.number = el("span", { class: "ss-num" }, "–");
    this.detail = el("span", { class: "ss-detail" });
    this.line = svg("path", { "vector-effect": "non-scaling-stroke" });
    const spark = svg(
      "svg",
      {
        class: "ss-spark",
        viewBox: "0 0 100 20",
        preserveAspectRatio: "none",
        "aria-hidden": "true",
      },
      this.line,
    );
    spark.style.color = `var(--ss-${spec.color || "gray"})`;
    // A total or a second number needs a line of its own, a unit does not.
    const layout = spec.of || spec.also || spec.special ? "ss-kpi-value ss-lines" : "ss-kpi-value";
    this.node = el(
      "div",
      { class: "ss-kpi", "data-testid": `kpi-${spec.id}`, title: spec.title || "" },
      el("div", { class: "ss-kpi-label" }, spec.label),
      el("div", { class: layout }, this.number, this.detail),
      ...(spec.special ? [] : [spark]),
    );
  }

  show([number, detail], reason = null) {
    setText(this.number, number);
    setText(this.detail, detail);
    setAttribute(this.node, "title", reason || this.spec.title || "");
    this.node.classList.toggle("ss-missing", number === MISSING);
  }

  update(store, progress, left) {
    const { spec } = this;
    if (spec.special) return this.show(...specialTile(spec, progress, left));
    const series = store[spec.series];
    const odd = oddNow(series, spec.metric) !== null;
    this.node.classList.toggle("ss-odd", odd);
    if (odd) {
      this.spark(series);
      return this.show(oddText(series, spec.metric));
    }
    const value = latest(series, spec.metric, spec.metric.includes("peak") ? "max" : "mean");
    if (value === null) return this.show([MISSING, ""], spec.reason || "No value recorded lately.");
    this.spark(series);
    return this.show(tileText(spec, value, store));
  }

  // The newest values over their places; like a chart's line it spans what a slow sensor leaves out.
  spark(series) {
    const { mean = [], odd = [] } = series.v[this.spec.metric] || {};
    const values = mean.slice(-SPARK_POINTS);
    const times = this.spec.series === "steps" ? null : series.t.slice(-SPARK_POINTS);
    const breaks = odd.slice(-SPARK_POINTS);
    const { x, y } = linePoints(
      values.map((_, i) => i),
      values,
      null,
      1,
      times,
      breaks,
    );
    const known = y.filter((value) => value !== null);
    const [low, high] = [Math.min(...known), Math.max(...known)];
    const height = (value) => (high > low ? 18 - (16 * (value - low)) / (high - low) : 18);
    const place = (i) => ((100 * i) / Math.max(1, values.length - 1)).toFixed(1);
    const pen = (i) => (i === 0 || y[i - 1] === null ? "M" : "L");
    const parts = y.map((value, i) =>
      value === null ? "" : `${pen(i)}${place(x[i])} ${height(value).toFixed(1)}`,
    );
    setAttribute(this.line, "d", parts.join(""));
  }
}

function specialTile({ special: kind, reason }, progress, left) {
  if (kind === "eta") {
    return left === null
      ? [[MISSING, ""], "Not known yet: it needs a few steps and a total number of steps."]
      : [[clock(left), ""]];
  }
  const total = progress?.[kind === "step" ? "total_steps" : "epochs"];
  const value = progress?.[kind];
  if (!isNumber(value)) return [[MISSING, ""], reason || "No step recorded yet."];
  const of = isNumber(total) ? `of ${total.toLocaleString("en-US")}` : "";
  return [[value.toLocaleString("en-US"), of]];
}

function tileText(spec, value, store) {
  if (spec.unit === "B") {
    const total = spec.of && (latest(store[spec.of.series], spec.of.metric) ?? spec.of.value);
    return bytesOf(value, total);
  }
  if (spec.also) {
    const [loss, accuracy] = spec.also.map((key) => latestEver(store.steps, key));
    const text = isNumber(loss) ? loss.toPrecision(3) : loss;
    const parts = [loss === null ? "" : `val ${text}`, isNumber(accuracy) ? percent(accuracy) : ""];
    return [precise(value), parts.filter(Boolean).join(" · ")];
  }
  if (spec.unit === "1/s") return [short(value), ""];
  const text = withUnit(value, spec.unit);
  const at = text.indexOf(" ");
  return at < 0 ? [text, ""] : [text.slice(0, at), text.slice(at + 1)];
}

class Header {
  constructor() {
    this.icon = el("span", { class: "ss-icon", "aria-hidden": "true" });
    this.word = el("span", {}, "Connecting");
    this.badge = el("span", { class: "ss-badge" }, this.icon, this.word);
    this.sentence = el("span", { class: "ss-sentence" });
    this.cost = el("span", {
      class: "ss-cost",
      title: "What a reading of all counters costs the sampler.",
    });
    this.trouble = el("div", {
      class: "ss-trouble",
      role: "alert",
      "data-testid": "trouble",
      hidden: "",
    });
    this.warnings = el("div", { role: "status", "data-testid": "warnings" });
    this.ack = el("div", { class: "ss-ack", role: "status", "data-testid": "ack", hidden: "" });
    this.fill = el("div", { class: "ss-fill" });
    this.bar = el(
      "div",
      {
        class: "ss-track",
        role: "progressbar",
        "aria-label": "Training progress",
        "aria-valuemin": 0,
        "aria-valuemax": 100,
      },
      this.fill,
    );
    this.progressText = el("div", { class: "ss-progress-text" });
    this.tileRow = el("div", { class: "ss-kpis" });
    this.tiles = [];
    const status = el(
      "div",
      { class: "ss-status", role: "status", "data-testid": "status" },
      this.badge,
      this.sentence,
    );
    this.node = el(
      "div",
      { class: "ss-head" },
      el("div", { class: "ss-top" }, status, this.cost),
      this.trouble,
      this.warnings,
      this.ack,
      el("div", { class: "ss-progress", "data-testid": "progress" }, this.bar, this.progressText),
      this.tileRow,
    );
  }

  configure({ kpis, axis }) {
    this.counts = axis === "step";
    this.tiles = kpis.map((spec) => new Tile(spec));
    this.tileRow.replaceChildren(...this.tiles.map((tile) => tile.node));
  }

  setTrouble(sentence) {
    setText(this.trouble, sentence || "");
    this.trouble.hidden = !sentence;
  }

  setAck(text, tone) {
    setText(this.ack, text || "");
    setAttribute(this.ack, "data-tone", tone || "done");
    this.ack.hidden = !text;
  }

  update(answer, store) {
    const left = secondsLeft(store.steps, answer.progress);
    this.updateStatus(answer, store);
    this.updateProgress(answer, store, left);
    const shownLeft = ENDED.has(answer.status) ? null : left;
    for (const tile of this.tiles) tile.update(store, answer.progress, shownLeft);
  }

  updateStatus(answer, store) {
    const [icon, word] = STATUSES[answer.status] || ["?", answer.status];
    setText(this.icon, icon);
    setText(this.word, word);
    setAttribute(this.badge, "data-status", answer.status);
    setText(this.sentence, answer.reason || "");
    this.warn(answer.warnings || []);
    const cost = ENDED.has(answer.status) ? null : latest(store.samples, "sampler/cost");
    setText(this.cost, cost === null ? "" : `Stepscope: ${withUnit(cost, "s")} a sample`);
  }

  // Sentences that stay are left alone: a screen reader says only what is new.
  warn(sentences) {
    while (this.warnings.childElementCount > sentences.length)
      this.warnings.lastElementChild.remove();
    sentences.forEach((sentence, i) => {
      if (!this.warnings.children[i]) this.warnings.append(el("div", { class: "ss-warning" }));
      setText(this.warnings.children[i], sentence);
    });
  }

  updateProgress(answer, store, left) {
    const { step, total_steps: total, epoch, epochs } = answer.progress || {};
    const share = isNumber(step) && total > 0 ? Math.min(1, step / total) : null;
    this.fill.style.transform = `scaleX(${share ?? 0})`;
    setAttribute(this.bar, "aria-valuenow", share === null ? null : Math.round(100 * share));
    this.bar.hidden = share === null; // nobody knows how far there is to go
    const count = (word, value, whole) => {
      if (!isNumber(value) || !this.counts) return "";
      const of = isNumber(whole) ? ` of ${whole.toLocaleString("en-US")}` : "";
      return `${word} ${value.toLocaleString("en-US")}${of}`;
    };
    const ended = ENDED.has(answer.status);
    const elapsed = ended
      ? Math.max(...Object.values(store).map((series) => series.t.at(-1) ?? 0), 0)
      : answer.now;
    const parts = [
      count("step", step, total),
      count("epoch", epoch, epochs),
      share === null ? "" : `${Math.floor(100 * share)} %`,
      isNumber(elapsed) ? `elapsed ${clock(elapsed)}` : "",
      left === null || ended ? "" : `about ${clock(left)} left`,
    ];
    setText(this.progressText, parts.filter(Boolean).join("  ·  "));
  }
}
