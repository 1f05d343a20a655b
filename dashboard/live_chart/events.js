// Events of a run: names, alerts, marks on the charts and the table.

import { el, parts } from "./dom.js";
import { MISSING, change, clock, counted, isNumber, plain } from "./format.js";
import { withAlpha } from "./theme.js";

// Kinds with another name, a label on the charts, or a weight other than routine.
const EVENTS = {
  empty_cache: ["Empty cache", "cache", "action"],
  reset_peaks: ["Reset peak stats", "peaks", "action"],
  collect_garbage: ["Collect garbage", "gc", "action"],
  save_checkpoint: ["Save checkpoint", "save"],
  mark: ["Mark", "mark", "action"],
  pause: ["Pause", "Ⅱ", "action"],
  resume: ["Resume", "▶", "action"],
  stop: ["Stop", "■", "action"],
  oom: ["Out of memory", "OOM", "bad"],
  oom_caught: ["OOM (caught)", "OOM caught", "bad"],
  nan: ["NaN loss", "NaN", "bad"],
  error: ["Error", "error", "bad"],
  gpu_lost: ["GPU lost", "lost", "bad"],
  gpu_recovered: ["GPU recovered", "back"],
  throttle_start: ["Throttling", "throttle", "bad"],
  throttle_end: ["Throttling ended", "full"],
  hang: ["Hang", "hang", "bad"],
  hang_over: ["Hang resolved", ""],
  xid: ["GPU error", "Xid", "bad"],
  ecc: ["Memory errors", "ECC", "bad"],
  resumed: ["Resumed", "resumed"],
  memory_snapshot: ["Memory snapshot", "snapshot"],
  profile: ["Profile", "profile", "action"],
  hook_failed: ["Capture failed", ""],
  amp_skipped: ["Step skipped", ""],
  cuda_graphs: ["CUDA Graphs", ""],
  warmup: ["Kernel warm-up", ""],
  memory_warmup: ["Preallocate memory", ""],
  alert: ["Alert", "alert"],
  alerts_problem: ["Alerts file", ""],
};
const ROUTINE = new Set(["epoch", "checkpoint", "status"]);
const MAX_ROWS = 200;
const LEVELS = { info: "Info", warning: "Warning", critical: "Critical" };

const isAlert = (event) => event.kind === "alert";
export const isCleared = (event) => event.data?.state === "cleared";
export const levelOf = (event) => LEVELS[event.data?.level] || "Warning";

// Returns the alerts that were raised and not cleared since, oldest first. A rule has one alert for
// each GPU and metric.
export function activeAlerts(events) {
  const active = new Map();
  for (const event of events.filter(isAlert)) {
    const { rule, uuid, metric } = event.data ?? {};
    const key = [rule, uuid, metric].join("|");
    active.delete(key);
    if (!isCleared(event)) active.set(key, event);
  }
  return [...active.values()];
}

export function nameOf(event) {
  if (isAlert(event)) return isCleared(event) ? "Alert cleared" : `Alert: ${levelOf(event)}`;
  const words = event.kind.replaceAll("_", " ");
  return EVENTS[event.kind]?.[0] ?? words.charAt(0).toUpperCase() + words.slice(1);
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

// The weight of an event: "bad", a user's "action", or "routine".
export function toneOf(event) {
  const tone = EVENTS[event.kind]?.[2];
  if (isAlert(event)) return isCleared(event) || event.data?.level === "info" ? "routine" : "bad";
  return commandOf(event) !== null && tone !== "bad" ? "action" : (tone ?? "routine");
}

const REPEATED = new Set(["epoch", "checkpoint", "amp_skipped"]); // with the progress of training

// Returns the rows {event, word, text}, newest first; of a repeated kind one row, at the newest.
export function rowsOf(events) {
  const counts = {};
  for (const { kind } of events) counts[kind] = (counts[kind] ?? 0) + 1;
  const listed = new Set();
  const rows = [];
  for (const event of events.toReversed()) {
    const { kind, data } = event;
    const repeated = REPEATED.has(kind) && data?.ok !== false && counts[kind] > 1;
    if (repeated && listed.has(kind)) continue;
    listed.add(kind);
    const word = repeated ? `${nameOf(event)} × ${counted(counts[kind])}` : nameOf(event);
    rows.push({ event, word, text: textOf(event) });
  }
  return rows;
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
  return EVENTS[event.kind]?.[1] ?? "";
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
// `place` maps x to pixels; `right` is the plot's edge. The pointer on a label reads the event.
export function markShapes(marks, spans, place, right, theme, metrics) {
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
  const hovertext = (event) => {
    const texts = [nameOf(event), changesOf(event, metrics), textOf(event)];
    return plain(texts.filter(Boolean).join(". "));
  };
  const annotations = placed.map(({ mark: { x, label, tone, event }, anchor }) => ({
    ...{ x, y: 1, yref: "paper", yanchor: "top", xanchor: anchor, text: label, showarrow: false },
    ...{ font: { size: 9.5, color: tone === "bad" ? orange : theme.text } },
    ...(event ? { hovertext: hovertext(event) } : {}),
  }));
  return { shapes, annotations };
}

export class EventTable {
  constructor() {
    const table =
      parts(`<section class="ss-box ss-card ss-section" data-testid="events" aria-label="Events">
      <header class="ss-head"><h3>Events</h3></header>
      <p class="ss-muted ss-note" ref="empty">No events yet. Epochs, checkpoints, actions and
        problems appear here.</p>
      <div class="ss-scroll" tabindex="0" role="group" aria-label="Table of events">
        <table hidden ref="table"><thead><tr><th scope="col" class="ss-figure">Time</th>
          <th scope="col" class="ss-figure">Step</th><th scope="col">Event</th>
          <th scope="col">Details</th><th scope="col">Before → after</th></tr></thead>
        <tbody ref="body"></tbody></table></div>
    </section>`);
    Object.assign(this, table);
  }

  show(events, metrics) {
    const rows = rowsOf(events).slice(0, MAX_ROWS);
    this.body.replaceChildren(...rows.map((row) => this.row(row, metrics)));
    this.table.hidden = rows.length === 0;
    this.empty.hidden = rows.length > 0;
  }

  row({ event, word, text }, metrics) {
    return el(
      "tr",
      { "data-kind": event.kind, "data-tone": toneOf(event) },
      el("td", { class: "ss-figure" }, isNumber(event.t) ? clock(event.t) : MISSING),
      el("td", { class: "ss-figure" }, isNumber(event.step) ? counted(event.step) : MISSING),
      el("td", { class: "ss-kind" }, word),
      el("td", {}, text),
      el("td", {}, changesOf(event, metrics)),
    );
  }
}
