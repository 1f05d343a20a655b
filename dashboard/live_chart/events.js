// Events: their words, the acknowledgement of a button, the table below the charts.

import { el, parts, setText } from "./dom.js";
import { MISSING, change, clock, isNumber } from "./format.js";
import { listed } from "./ranks_data.js";
import { isAlert, isOver, levelWord } from "./toasts.js";

// Each kind: its words, its label on the charts ("" for a line alone), and its group. Those of "bad"
// are failures that stand out.
export const EVENTS = {
  epoch: ["Epoch", "", "epochs"],
  checkpoint: ["Checkpoint", "", "epochs"],
  empty_cache: ["Empty cache", "cache", "commands"],
  reset_peaks: ["Reset peak stats", "peaks", "commands"],
  collect_garbage: ["Collect garbage", "gc", "commands"],
  save_checkpoint: ["Save checkpoint", "save", "other"],
  mark: ["Mark", "mark", "commands"],
  pause: ["Pause", "Ⅱ", "commands"],
  resume: ["Resume", "▶", "commands"],
  stop: ["Stop", "■", "commands"],
  oom: ["Out of memory", "OOM", "bad"],
  oom_caught: ["OOM (caught)", "OOM caught", "bad"],
  nan: ["NaN loss", "NaN", "bad"],
  error: ["Error", "error", "bad"],
  gpu_lost: ["GPU lost", "lost", "bad"],
  gpu_recovered: ["GPU recovered", "back", "other"],
  throttle_start: ["Throttling", "throttle", "bad"],
  throttle_end: ["Throttling ended", "full", "other"],
  hang: ["Hang", "hang", "bad"],
  hang_over: ["Hang resolved", "", "failures"],
  xid: ["GPU error", "Xid", "bad"],
  ecc: ["Memory errors", "ECC", "bad"],
  remapped_rows: ["Rows remapped", "", "other"],
  gpu_recovery_action: ["GPU action required", "GPU", "bad"],
  status: ["Status", "", "other"],
  resumed: ["Resumed", "resumed", "other"],
  sampler_slowed: ["Sampler slowed", "", "failures"],
  clock_set: ["Clock set", "", "other"],
  memory_snapshot: ["Memory snapshot", "snapshot", "other"],
  profile: ["Profile", "profile", "commands"],
  hook_failed: ["Capture failed", "", "failures"],
  output_lost: ["Output lost", "", "failures"],
  amp_skipped: ["Step skipped", "", "failures"],
  compile: ["Compile", "", "other"],
  cuda_graphs: ["CUDA Graphs", "", "other"],
  warmup: ["Kernel warm-up", "", "other"],
  memory_warmup: ["Preallocate memory", "", "other"],
  alert: ["Alert", "alert", "failures"],
  alerts_problem: ["Alerts file", "", "failures"],
};
export const ROUTINE = new Set(["epoch", "checkpoint", "status"]);
const MAX_ROWS = 200;

// An alert has its level in place of the word.
export function wordOf(event) {
  if (isAlert(event)) return isOver(event) ? "Alert cleared" : `Alert: ${levelWord(event)}`;
  return EVENTS[event.kind]?.[0] || event.kind;
}

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

const GROUPS = {
  all: "All",
  commands: "Commands",
  failures: "Failures",
  epochs: "Epochs, checkpoints",
  other: "Other",
};
const REPEATED = ["epoch", "checkpoint", "amp_skipped"]; // with the progress of training
const FOLD_FROM = 4; // events of such a kind

function groupOf(event) {
  const group = EVENTS[event.kind]?.[2];
  if (group === "bad" || group === "failures") return "failures";
  if (commandOf(event) !== null || group === "commands") return "commands";
  return event.data?.ok === false ? "failures" : (group ?? "other");
}

// How much an event stands out: "bad", "action" of somebody, or "routine".
export function toneOf(event) {
  if (EVENTS[event.kind]?.[2] === "bad") return "bad";
  if (isAlert(event)) return isOver(event) || event.data?.level === "info" ? "routine" : "bad";
  return groupOf(event) === "commands" ? "action" : "routine";
}

// The events of a group as the table shows them, newest first: {event, word, text}. Among all,
// those of a repeated kind are one row once they are many; it stands where the newest is.
export function rowsOf(events, group) {
  const shown = oneForRanks(events).filter((event) => group === "all" || groupOf(event) === group);
  const folds = new Map();
  if (group === "all")
    for (const kind of REPEATED) {
      const same = shown.filter((event) => event.kind === kind && event.data?.ok !== false);
      if (same.length >= FOLD_FROM) folds.set(same.at(-1), same);
    }
  const folded = new Set([...folds.values()].flat());
  const row = (event) => ({ event, word: wordOf(event), text: event.text || "" });
  const kept = shown.filter((event) => folds.has(event) || !folded.has(event));
  return kept.reverse().map((event) => (folds.has(event) ? foldOf(folds.get(event)) : row(event)));
}

// What several ranks answered alike to one command is one event: "Ranks 1–3: memory was freed".
export function oneForRanks(events) {
  const together = new Map();
  for (const event of events) {
    const key = answerOf(event);
    if (key !== null) together.set(key, [...(together.get(key) ?? []), event]);
  }
  return events.flatMap((event) => {
    const same = together.get(answerOf(event)) ?? [event];
    if (same.length === 1) return [event];
    const ranks = listed(same.map(({ data }) => data.rank));
    return event === same[0] ? [{ ...event, text: `Ranks ${ranks}: ${ownText(event)}` }] : [];
  });
}

const ownText = (event) => (event.text || "").replace(/^Rank \d+: /, "");

// What is the same in the answers of ranks to a command; null for another event.
function answerOf(event) {
  const { rank, command_id: id, ok } = event.data || {};
  return rank === undefined || !id ? null : JSON.stringify([event.kind, id, ok, ownText(event)]);
}

// One row for many events: "Epochs 1–480", "last: validation loss 0.031".
function foldOf(same) {
  const [first, event] = [same[0], same.at(-1)];
  const many = event.kind === "epoch" && isNumber(first.epoch) && isNumber(event.epoch);
  const word = many
    ? `Epochs ${first.epoch}–${event.epoch}`
    : `${wordOf(event)} × ${same.length.toLocaleString("en-US")}`;
  const text = (event.text || "").replace(/^Epoch \d+: /, "");
  return { event, word, text: `last: ${text}`, fold: true };
}

export class EventTable {
  constructor() {
    const table =
      parts(`<section class="ss-events ss-card" data-testid="events" aria-label="Events">
      <header class="ss-card-head"><h3>Events</h3>
        <select aria-label="Filter events" ref="select"></select>
        <span class="ss-muted" ref="count"></span></header>
      <p class="ss-muted ss-empty" ref="empty">No events yet. Epochs, checkpoints, actions and
        problems appear here.</p>
      <div class="ss-scroll" tabindex="0"><table hidden ref="table">
        <thead><tr><th scope="col">Time</th><th scope="col">Step</th><th scope="col">Event</th>
          <th scope="col">Details</th><th scope="col">Before → after</th></tr></thead>
        <tbody ref="body"></tbody></table></div>
    </section>`);
    Object.assign(this, table, { events: [], metrics: {}, group: "all" });
    const option = ([value, text]) => el("option", { value }, text);
    this.select.append(...Object.entries(GROUPS).map(option));
    this.select.addEventListener("change", () => this.choose(this.select.value));
  }

  clear() {
    this.show([], {});
  }

  choose(group) {
    this.group = this.select.value = group;
    this.show(this.events, this.metrics);
  }

  show(events, metrics) {
    Object.assign(this, { events, metrics });
    const rows = rowsOf(events, this.group);
    this.body.replaceChildren(...rows.slice(0, MAX_ROWS).map((row) => this.row(row)));
    this.table.hidden = rows.length === 0;
    this.select.hidden = events.length === 0;
    this.empty.hidden = events.length > 0;
    const newest = rows.length > MAX_ROWS ? `newest ${MAX_ROWS} of ${rows.length}` : "";
    setText(this.count, newest || (events.length ? String(events.length) : ""));
  }

  row({ event, word, text, fold }) {
    const tone = toneOf(event);
    const step = isNumber(event.step) ? event.step.toLocaleString("en-US") : MISSING;
    const unfold = { type: "button", class: "ss-link", onclick: () => this.choose(groupOf(event)) };
    return el(
      "tr",
      { "data-kind": event.kind, "data-tone": tone },
      el("td", { class: "ss-figure" }, isNumber(event.t) ? clock(event.t) : MISSING),
      el("td", { class: "ss-figure" }, step),
      el("td", { class: "ss-kind" }, fold ? el("button", unfold, word) : word),
      el("td", {}, text),
      el("td", { class: "ss-figures" }, changesOf(event, this.metrics)),
    );
  }
}
