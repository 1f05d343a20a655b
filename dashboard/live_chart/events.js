// Events of a run: names, groups, alerts, marks on the charts, the table, and toasts of alerts.

import { button, el, parts, setText } from "./dom.js";
import { MISSING, change, clock, counted, isNumber } from "./format.js";
import { withAlpha } from "./theme.js";

// Each kind: name, label on the charts ("" for a line alone), and group: "bad" failures have a mark.
const EVENTS = {
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
const ROUTINE = new Set(["epoch", "checkpoint", "status"]);
const MAX_ROWS = 200;
const MAX_TOASTS = 3;
const LEVELS = { info: "Info", warning: "Warning", critical: "Critical" };

const isAlert = (event) => event.kind === "alert";
export const isCleared = (event) => event.data?.state === "cleared";
export const levelOf = (event) => LEVELS[event.data?.level] || "Warning";

// The identity of an alert: a rule has one alert for each rank, GPU and metric.
export const alertKey = ({ data = {} }) =>
  [data.rank || 0, data.rule, data.uuid, data.metric].join("|");

// Returns the alerts that were raised and not cleared since, oldest first.
export function activeAlerts(events) {
  const active = new Map();
  for (const event of events.filter(isAlert)) {
    active.delete(alertKey(event));
    if (!isCleared(event)) active.set(alertKey(event), event);
  }
  return [...active.values()];
}

export function nameOf(event) {
  if (isAlert(event)) return isCleared(event) ? "Alert cleared" : `Alert: ${levelOf(event)}`;
  return EVENTS[event.kind]?.[0] || event.kind;
}

// The text of an event; "" if it only repeats the name.
export function textOf(event) {
  return event.text && event.text !== nameOf(event) ? event.text : "";
}

// The numbers before and after an event: those that changed, or all if none changed.
export function changesOf(event, metrics) {
  const { before, after } = event.data || {};
  if (!before || !after) return "";
  const keys = Object.keys(after).filter((key) => key in before);
  const changed = keys.filter((key) => before[key] !== after[key]);
  const text = (key) => {
    const { label = key, unit = "" } = metrics[key] ?? {};
    return change(label, unit, before[key], after[key]);
  };
  return (changed.length ? changed : keys).map(text).join(", ");
}

export function ackText(event) {
  const outcome = event.data?.ok === false ? "refused" : "done";
  const where = isNumber(event.step) ? ` at step ${counted(event.step)}` : "";
  const name = nameOf(event);
  const named = !event.text || event.text.startsWith(name);
  return `${named ? event.text || name : `${name}: ${event.text}`} — ${outcome}${where}`;
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
const MIN_REPEATED = 4; // events of such a kind in one row

function groupOf(event) {
  const group = EVENTS[event.kind]?.[2];
  if (group === "bad" || group === "failures") return "failures";
  if (commandOf(event) !== null || group === "commands") return "commands";
  return event.data?.ok === false ? "failures" : (group ?? "other");
}

// The weight of an event: "bad", a user's "action", or "routine".
export function toneOf(event) {
  if (EVENTS[event.kind]?.[2] === "bad") return "bad";
  if (isAlert(event)) return isCleared(event) || event.data?.level === "info" ? "routine" : "bad";
  return groupOf(event) === "commands" ? "action" : "routine";
}

// Returns the rows {event, word, text} of a group, newest first. In "all", events of a repeated kind
// are one row, at the place of the newest.
export function rowsOf(events, group) {
  const shown = events.filter((event) => group === "all" || groupOf(event) === group);
  const merged = new Map();
  for (const kind of group === "all" ? REPEATED : []) {
    const same = shown.filter((event) => event.kind === kind && event.data?.ok !== false);
    if (same.length >= MIN_REPEATED) for (const event of same) merged.set(event, same);
  }
  const row = (event) =>
    merged.has(event)
      ? mergedRow(merged.get(event))
      : { event, word: nameOf(event), text: textOf(event) };
  const newest = (event) => !merged.has(event) || merged.get(event).at(-1) === event;
  return shown.filter(newest).reverse().map(row);
}

// One row for many events: "Epochs 1–480", "last: validation loss 0.031".
function mergedRow(same) {
  const [first, event] = [same[0], same.at(-1)];
  const numbered = event.kind === "epoch" && isNumber(first.epoch) && isNumber(event.epoch);
  const word = numbered
    ? `Epochs ${first.epoch}–${event.epoch}`
    : `${nameOf(event)} × ${counted(same.length)}`;
  const text = (event.text || "").replace(/^Epoch \d+: /, "");
  return { event, word, text: `last: ${text}`, merged: true };
}

// Marks: events, and stretches without finite values, as Plotly shapes with short labels.

const MAX_MARKS = 60;
const MAX_EPOCH_MARKS = 12;
// The shortest distance between two marks of a kind, as a fraction of the range.
const MIN_DISTANCE = { bad: 1 / 80, action: 1 / 80, routine: 1 / 12 };
const MAX_CHARACTER_PX = 5.5;
const LABEL_GAP_PX = 3; // from the line

function labelOf(event) {
  if (event.kind === "epoch") return `e${event.epoch ?? ""}`;
  if (isAlert(event) && isCleared(event)) return "";
  return EVENTS[event.kind]?.[1] ?? event.kind;
}

// Returns the distance of marked epochs: 1, 2, 5, 10, 20, … Few marks stay, at fixed epochs.
function epochStride(epochs) {
  let stride = 1;
  for (let i = 0; epochs / stride > MAX_EPOCH_MARKS; i += 1) stride *= i % 3 === 1 ? 2.5 : 2;
  return stride;
}

// Returns the newest marks of a range: of routine events every few epochs, of a kind one at one place.
export function marksIn(events, axis, range) {
  const place = (event) => (axis === "time" ? event.t : event.step);
  const inside = events.filter(
    (event) => isNumber(place(event)) && place(event) >= range[0] && place(event) <= range[1],
  );
  const epochs = inside.filter(({ kind }) => kind === "epoch").map(({ epoch }) => epoch);
  const stride = epochStride(new Set(epochs).size);
  const newest = {};
  const apart = inside.reverse().filter((event) => {
    if (ROUTINE.has(event.kind) && (event.epoch || 0) % stride !== 0) return false;
    const near = (range[1] - range[0]) * MIN_DISTANCE[toneOf(event)];
    const close = event.kind !== "epoch" && newest[event.kind] - place(event) < near;
    if (!close) newest[event.kind] = place(event);
    return !close;
  });
  const mark = (event) => ({ x: place(event), tone: toneOf(event), label: labelOf(event), event });
  return apart.slice(0, MAX_MARKS).reverse().map(mark);
}

// Places labels at lines `at` (px), left of the `right` edge; of touching ones failures, newer ones.
export function placeLabels(marks, at, right) {
  const placed = [];
  for (const tone of ["bad", "action", "routine"]) {
    for (let i = marks.length - 1; i >= 0; i -= 1) {
      const mark = marks[i];
      if (mark.tone !== tone || !mark.label) continue;
      const width = MAX_CHARACTER_PX * mark.label.length;
      const fits = at[i] + LABEL_GAP_PX + width <= right;
      const from = fits ? at[i] + LABEL_GAP_PX : at[i] - LABEL_GAP_PX - width;
      const to = from + width;
      const touches = placed.some((other) => from <= other.to && to >= other.from);
      if (!touches) placed.push({ mark, from, to, anchor: fits ? "left" : "right" });
    }
  }
  return placed;
}

// Returns `shapes` and `annotations` for marks, and for `spans` {from, to, word} without finite values.
// `place` maps x to pixels; `right` is the plot's edge.
export function markShapes(marks, spans, place, right, theme) {
  const { orange, gray } = theme.palette;
  const lines = {
    routine: { color: withAlpha(gray, 0.35), width: 1, dash: "dot" },
    action: { color: theme.line, width: 1 },
    bad: { color: orange, width: 1 },
  };
  const over = { yref: "paper", y0: 0, y1: 1 };
  const shapes = marks.map(({ x, tone }) => ({
    ...{ type: "line", x0: x, x1: x, ...over, line: lines[tone] },
  }));
  const odd = { fillcolor: withAlpha(orange, 0.14), line: { color: orange, width: 1 } };
  for (const { from, to } of spans)
    shapes.push({ type: "rect", x0: from, x1: to, ...over, ...odd });
  const words = spans.map(({ from, word }) => ({ x: from, label: word, tone: "bad" }));
  const all = [...words, ...marks];
  const at = all.map(({ x }) => place(x));
  const placed = placeLabels(all, at, right);
  const annotations = placed.map(({ mark: { x, label, tone }, anchor }) => ({
    ...{ x, y: 1, yref: "paper", yanchor: "top", xanchor: anchor, text: label, showarrow: false },
    font: { size: 9.5, color: tone === "bad" ? orange : theme.text },
  }));
  return { shapes, annotations };
}

export class EventTable {
  constructor() {
    const table =
      parts(`<section class="ss-box ss-card ss-section" data-testid="events" aria-label="Events">
      <header class="ss-head"><h3>Events</h3>
        <select class="ss-field" aria-label="Filter events" ref="select"></select>
        <span class="ss-muted" ref="count"></span></header>
      <p class="ss-muted ss-note" ref="empty">No events yet. Epochs, checkpoints, actions and
        problems appear here.</p>
      <div class="ss-scroll" tabindex="0" role="group" aria-label="Table of events">
        <table hidden ref="table"><thead><tr><th scope="col" class="ss-figure">Time</th>
          <th scope="col" class="ss-figure">Step</th><th scope="col">Event</th>
          <th scope="col">Details</th><th scope="col">Before → after</th></tr></thead>
        <tbody ref="body"></tbody></table></div>
    </section>`);
    Object.assign(this, table, { events: [], metrics: {}, group: "all" });
    this.select.append(
      ...Object.entries(GROUPS).map(([value, text]) => el("option", { value }, text)),
    );
    this.select.addEventListener("change", () => this.choose(this.select.value));
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

  row({ event, word, text, merged }) {
    const open = () => this.choose(groupOf(event));
    return el(
      "tr",
      { "data-kind": event.kind, "data-tone": toneOf(event) },
      el("td", { class: "ss-figure" }, isNumber(event.t) ? clock(event.t) : MISSING),
      el("td", { class: "ss-figure" }, isNumber(event.step) ? counted(event.step) : MISSING),
      el("td", { class: "ss-kind" }, merged ? button(open, { class: "ss-link" }, word) : word),
      el("td", {}, text),
      el("td", {}, changesOf(event, this.metrics)),
    );
  }
}

export const shownAfter = (shown, fresh) => activeAlerts([...shown, ...fresh]).slice(-MAX_TOASTS);

// Toasts of new alerts, until they are dismissed or cleared, or newer alerts need the place.
export class Toasts {
  constructor() {
    this.nodes = new Map(); // event -> toast, oldest first
    // A critical alert interrupts a screen reader, the others wait.
    const toasts = parts(`<div class="ss-toasts" role="region" aria-label="Alerts"
      data-testid="toasts">
      <div aria-live="assertive" ref="assertive"></div><div aria-live="polite" ref="polite"></div>
    </div>`);
    Object.assign(this, toasts);
  }

  take(fresh) {
    if (fresh.some(isAlert)) this.show(shownAfter([...this.nodes.keys()], fresh));
  }

  // Shows these alerts. A toast that stays is not touched: a screen reader reads new nodes only.
  show(events) {
    const before = this.nodes;
    this.nodes = new Map(events.map((event) => [event, before.get(event) ?? this.toast(event)]));
    for (const [event, node] of before) if (!this.nodes.has(event)) node.remove();
  }

  toast(event) {
    const { text = "", data } = event;
    const name = levelOf(event);
    const close = { class: "ss-button", "aria-label": `Dismiss: ${text || name}` };
    const node = el(
      "div",
      { class: "ss-toast ss-float ss-row", "data-level": data?.level },
      el("strong", {}, name),
      el("span", {}, text),
      button(() => this.dismiss(event), close, "×"),
    );
    (data?.level === "critical" ? this.assertive : this.polite).append(node);
    return node;
  }

  // The next toast has the focus after a toast is dismissed by keyboard.
  dismiss(event) {
    const focused = this.nodes.get(event).contains(document.activeElement);
    this.show([...this.nodes.keys()].filter((other) => other !== event));
    if (focused) this.node.querySelector("button")?.focus();
  }
}
