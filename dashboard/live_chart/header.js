// The row that stays in sight: the run, its status and progress, and the buttons; below it the result
// of the last command, warnings, and the tabs.

import { ButtonGroup, RetryButton, RunPicker, TabBar } from "./commands.js";
import { el, setAttribute, setText } from "./dom.js";
import { clock, isNumber, withUnit } from "./format.js";
import { latest, secondsLeft } from "./series.js";
import { activeAlerts } from "./toasts.js";

const STATUSES = {
  pending: ["○", "Pending"],
  running: ["●", "Running"],
  paused: ["Ⅱ", "Paused"],
  finished: ["✓", "Finished"],
  stopped: ["■", "Stopped"],
  failed: ["✕", "Failed"],
  crashed: ["!", "Crashed"],
};

const counted = (value) => value.toLocaleString("en-US");

// "2,244 / 30,600 · 7 % · 3:03 left", as far as it is known; `share` is null where it is not.
export function progressOf({ answer, live, ended }) {
  const { step, total_steps: total } = answer.progress || {};
  const share = isNumber(step) && total > 0 ? Math.min(1, step / total) : null;
  const moves = !ended && answer.status !== "paused";
  const left = moves ? secondsLeft(live.steps, answer.progress) : null;
  const parts = [
    isNumber(step) ? `step ${counted(step)}${isNumber(total) ? ` of ${counted(total)}` : ""}` : "",
    share === null ? "" : `${Math.floor(100 * share)} %`,
    left === null ? "" : `${clock(left)} left`,
  ];
  return { share, text: parts.filter(Boolean).join(" · ") };
}

// Epoch, time since the beginning, and what the sampler costs.
export function detailsOf({ answer, live, ended }) {
  const { epoch, epochs } = answer.progress || {};
  const times = Object.values(live).map((series) => series.t.at(-1) ?? 0);
  const elapsed = ended ? Math.max(...times, 0) : answer.now;
  const cost = ended ? null : latest(live.samples, "sampler/cost");
  const parts = [
    isNumber(epoch)
      ? `epoch ${counted(epoch)}${isNumber(epochs) ? ` of ${counted(epochs)}` : ""}`
      : "",
    isNumber(elapsed) ? `elapsed ${clock(elapsed)}` : "",
    cost === null ? "" : `Stepscope: ${withUnit(cost, "s")} a sample`,
  ];
  return parts.filter(Boolean).join(" · ");
}

export class Header {
  // `retry()`, `pick(run)`, `open(tab)` and `send(button, args)` are called for what is pressed.
  constructor({ retry, pick, open, send }) {
    this.icon = el("span", { class: "ss-icon", "aria-hidden": "true" });
    this.word = el("span", {});
    this.badge = el("span", { class: "ss-badge" }, this.icon, this.word);
    this.sentence = el("span", { class: "ss-sentence" });
    this.picker = new RunPicker(pick);
    this.alerts = el("span", { class: "ss-alerts", "data-testid": "alerts", hidden: "" });
    this.progressText = el("span", { class: "ss-progress-text" });
    this.retry = new RetryButton(retry);
    this.tabs = new TabBar(open);
    this.buttons = new ButtonGroup(false, send, "Run");
    this.ack = el("span", { class: "ss-ack", role: "status", "data-testid": "ack" });
    this.details = el("span", { class: "ss-details" });
    this.lookOnly = el("p", { class: "ss-look-only" });
    this.trouble = el("p", { class: "ss-trouble", role: "alert", "data-testid": "trouble" });
    this.warnings = el("div", { role: "status", "data-testid": "warnings" });
    this.fill = el("div", { class: "ss-fill" });
    const progress = {
      class: "ss-track",
      role: "progressbar",
      "aria-label": "Training progress",
      "aria-valuemin": 0,
      "aria-valuemax": 100,
    };
    this.bar = el("div", progress, this.fill);
    this.node = this.build();
  }

  build() {
    const status = { class: "ss-status", role: "status", "data-testid": "status" };
    return el(
      "div",
      { class: "ss-header", role: "region", "aria-label": "Run", "data-testid": "header" },
      el(
        "div",
        { class: "ss-row" },
        el("div", status, this.badge, this.sentence),
        this.alerts,
        this.picker.node,
        el("span", { "data-testid": "progress" }, this.progressText),
        el("div", { class: "ss-actions" }, this.retry.node, this.buttons.node),
      ),
      el("div", { class: "ss-row ss-second" }, this.ack, this.details),
      this.lookOnly,
      this.trouble,
      this.warnings,
      this.bar,
      this.tabs.node,
    );
  }

  configure({ buttons }) {
    this.buttons.configure(buttons);
  }

  // Sticks below Streamlit's own bar, which lies over the page.
  place() {
    const bar = document.querySelector("[data-testid=stHeader]");
    const height = bar ? bar.getBoundingClientRect().height : 0;
    this.node.style.setProperty("--ss-top", `${height}px`);
  }

  say(node, sentence) {
    setText(node, sentence || "");
    node.hidden = !sentence;
  }

  update(store) {
    const { header, answer, told } = store;
    this.picker.update(header.runs, header.picked);
    this.tabs.update(header.tabs, store.tab);
    if (header.retry) this.retry.update(header.retry, store.waitingFor === "retry");
    else this.retry.hide();
    this.buttons.update(answer?.status, store.waitingFor);
    setText(this.ack, told?.text || "");
    setAttribute(this.ack, "data-tone", told?.tone || null);
    this.say(this.lookOnly, header.look_only);
    this.say(this.trouble, store.connection || store.unreadable);
    this.updateStatus(store);
    this.updateAlerts(store);
    const { share, text } = answer ? progressOf(store) : { share: null, text: "" };
    setText(this.progressText, text);
    setText(this.details, answer ? detailsOf(store) : "");
    const noEpoch = isNumber(answer?.progress?.epoch) ? null : store.layout?.no_epoch;
    setAttribute(this.details, "title", noEpoch ?? null);
    this.fill.style.transform = `scaleX(${share ?? 0})`;
    setAttribute(this.bar, "aria-valuenow", share === null ? null : Math.round(100 * share));
    this.bar.hidden = share === null; // nobody knows how far there is to go
  }

  updateStatus({ run, answer, unreadable }) {
    const unknown = unreadable ? ["!", "Unreadable"] : ["○", "Connecting"];
    const [icon, word] = answer ? STATUSES[answer.status] || ["?", answer.status] : unknown;
    setText(this.icon, icon);
    setText(this.word, word);
    setAttribute(this.badge, "data-status", answer?.status ?? (unreadable ? "failed" : null));
    this.badge.hidden = !run && !unreadable;
    setText(this.sentence, answer?.reason || "");
    this.warn(answer?.warnings || []);
  }

  // How many alerts are raised now; of an ended run nothing is.
  updateAlerts({ events, ended }) {
    const active = ended ? [] : activeAlerts(events);
    this.alerts.hidden = !active.length;
    setText(this.alerts, active.length === 1 ? "1 alert" : `${active.length} alerts`);
    setAttribute(this.alerts, "title", active.map((event) => event.text).join("\n") || null);
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
}
