// What stands above the numbers: the status and how far the run is.

import { el, setAttribute, setText } from "./dom.js";
import { clock, isNumber, withUnit } from "./format.js";
import { latest, secondsLeft } from "./series.js";

const STATUSES = {
  pending: ["○", "Pending"],
  running: ["●", "Running"],
  paused: ["Ⅱ", "Paused"],
  finished: ["✓", "Finished"],
  stopped: ["■", "Stopped"],
  failed: ["✕", "Failed"],
  crashed: ["!", "Crashed"],
};

export class Header {
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
    );
  }

  configure({ axis }) {
    this.counts = axis === "step";
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

  update({ answer, live, ended }) {
    const [icon, word] = STATUSES[answer.status] || ["?", answer.status];
    setText(this.icon, icon);
    setText(this.word, word);
    setAttribute(this.badge, "data-status", answer.status);
    setText(this.sentence, answer.reason || "");
    this.warn(answer.warnings || []);
    const cost = ended ? null : latest(live.samples, "sampler/cost");
    setText(this.cost, cost === null ? "" : `Stepscope: ${withUnit(cost, "s")} a sample`);
    this.updateProgress(answer, live, ended);
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

  updateProgress(answer, live, ended) {
    const left = secondsLeft(live.steps, answer.progress);
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
    const elapsed = ended
      ? Math.max(...Object.values(live).map((series) => series.t.at(-1) ?? 0), 0)
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
