// Events: their words, the acknowledgement of a button, the table below the charts.

import { el, setText } from "./dom.js";
import { MISSING, change, clock, isNumber } from "./format.js";

export const EVENT_WORDS = {
  epoch: "Epoch",
  checkpoint: "Checkpoint",
  empty_cache: "Empty cache",
  reset_peaks: "Reset peak stats",
  collect_garbage: "Collect garbage",
  save_checkpoint: "Save checkpoint",
  mark: "Mark",
  pause: "Pause",
  resume: "Resume",
  stop: "Stop",
  oom: "Out of memory",
  nan: "NaN loss",
  error: "Error",
  gpu_lost: "GPU lost",
  gpu_recovered: "GPU back",
  throttle_start: "Throttling",
  throttle_end: "Throttling over",
  status: "Status",
  resumed: "Resumed",
  sampler_slowed: "Sampler slowed",
  memory_snapshot: "Memory snapshot",
  hook_failed: "Not recorded",
  output_lost: "Output not kept",
  amp_skipped: "Step skipped",
};
export const BAD = new Set(["oom", "nan", "error", "gpu_lost", "throttle_start"]);
export const ROUTINE = new Set(["epoch", "checkpoint", "status"]);
const MAX_ROWS = 200;

export const wordOf = (event) => EVENT_WORDS[event.kind] || event.kind;

// The numbers before and after, only those that moved unless none did.
export function changesOf(event, metrics) {
  const { before, after } = event.data || {};
  if (!before || !after) return "";
  const keys = Object.keys(after).filter((key) => key in before);
  const moved = keys.filter((key) => before[key] !== after[key]);
  return (moved.length ? moved : keys)
    .map((key) =>
      change(metrics[key]?.label || key, metrics[key]?.unit || "", before[key], after[key]),
    )
    .join(", ");
}

export function ackText(event) {
  const done = event.data?.ok === false ? "refused" : "done";
  const where = isNumber(event.step) ? ` at step ${event.step.toLocaleString("en-US")}` : "";
  const word = wordOf(event);
  const text =
    event.text && !event.text.startsWith(word) ? `${word}: ${event.text}` : event.text || word;
  return `${text} — ${done}${where}`;
}

export const commandOf = (event) => event.data?.command_id ?? null;

export class EventTable {
  constructor() {
    this.body = el("tbody");
    this.count = el("span", { class: "ss-muted" });
    const nothing =
      "Nothing has happened yet: epochs, checkpoints, button presses and problems appear here.";
    this.empty = el("p", { class: "ss-muted ss-empty" }, nothing);
    const head = ["Time", "Step", "Event", "What happened", "Before → after"].map((text) =>
      el("th", { scope: "col" }, text),
    );
    this.table = el("table", { hidden: "" }, el("thead", {}, el("tr", {}, ...head)), this.body);
    this.node = el(
      "section",
      { class: "ss-events ss-card", "data-testid": "events", "aria-label": "Events" },
      el("header", { class: "ss-card-head" }, el("h3", {}, "Events"), this.count),
      this.empty,
      el("div", { class: "ss-scroll" }, this.table),
    );
  }

  clear() {
    this.body.replaceChildren();
    this.show(0);
  }

  show(total) {
    this.table.hidden = total === 0;
    this.empty.hidden = total !== 0;
    setText(
      this.count,
      total > MAX_ROWS ? `newest ${MAX_ROWS} of ${total}` : total ? String(total) : "",
    );
  }

  add(events, metrics, total) {
    const rows = events
      .slice(-MAX_ROWS)
      .map((event) => this.row(event, metrics))
      .reverse();
    this.body.prepend(...rows);
    while (this.body.childElementCount > MAX_ROWS) this.body.lastElementChild.remove();
    this.show(total);
  }

  row(event, metrics) {
    const tone = BAD.has(event.kind) ? "bad" : ROUTINE.has(event.kind) ? "routine" : "action";
    return el(
      "tr",
      { "data-kind": event.kind, "data-tone": tone },
      el("td", { class: "ss-figure" }, isNumber(event.t) ? clock(event.t) : MISSING),
      el(
        "td",
        { class: "ss-figure" },
        isNumber(event.step) ? event.step.toLocaleString("en-US") : MISSING,
      ),
      el("td", { class: "ss-kind" }, wordOf(event)),
      el("td", {}, event.text || ""),
      el("td", { class: "ss-figures" }, changesOf(event, metrics)),
    );
  }
}
