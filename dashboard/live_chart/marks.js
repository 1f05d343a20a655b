// Events as vertical lines with a short label on the charts.

import { setAttribute, svg } from "./dom.js";
import { ROUTINE, toneOf } from "./events.js";
import { isNumber } from "./format.js";
import { isAlert, isOver } from "./toasts.js";

const MARK_LABELS = {
  checkpoint: "",
  empty_cache: "cache",
  reset_peaks: "peaks",
  collect_garbage: "gc",
  save_checkpoint: "save",
  mark: "mark",
  pause: "Ⅱ",
  resume: "▶",
  stop: "■",
  oom: "OOM",
  oom_caught: "OOM caught",
  nan: "NaN",
  error: "error",
  gpu_lost: "lost",
  gpu_recovered: "back",
  throttle_start: "throttle",
  throttle_end: "full",
  hang: "hang",
  hang_over: "",
  xid: "Xid",
  ecc: "ECC",
  remapped_rows: "",
  gpu_recovery_action: "GPU",
  status: "",
  memory_snapshot: "snapshot",
  hook_failed: "",
  output_lost: "",
  amp_skipped: "",
  resumed: "resumed",
  sampler_slowed: "",
  clock_set: "",
  compile: "",
  cuda_graphs: "",
  warmup: "",
  memory_warmup: "",
  alert: "alert",
  alerts_problem: "",
};
const MAX_MARKS = 60;
const MAX_EPOCH_MARKS = 12;
// Parts of the range, at least, between two marks of a kind.
const MARKS_APART = { bad: 1 / 80, action: 1 / 80, routine: 1 / 12 };
const LABEL_CHARACTER = 5.5; // px, at most
const LABEL_GAP = 3; // px from the line

function labelOf(event) {
  if (event.kind === "epoch") return `e${event.epoch ?? ""}`;
  if (isAlert(event) && isOver(event)) return "";
  return MARK_LABELS[event.kind] ?? event.kind;
}

// Every how many epochs to mark one: 1, 2, 5, 10, 20, … so that few marks stay, and stay put.
function epochStride(epochs) {
  let stride = 1;
  for (let i = 0; epochs / stride > MAX_EPOCH_MARKS; i += 1) stride *= i % 3 === 1 ? 2.5 : 2;
  return stride;
}

// Events to mark within a range: the newest MAX_MARKS, routine ones only of every few epochs, and
// of several of a kind in one place the newest.
export function marksIn(events, axis, range) {
  const place = (event) => (axis === "time" ? event.t : event.step);
  const inside = events.filter(
    (event) => isNumber(place(event)) && place(event) >= range[0] && place(event) <= range[1],
  );
  const epochs = new Set(
    inside.filter((event) => event.kind === "epoch").map((event) => event.epoch),
  );
  const stride = epochStride(epochs.size);
  const kept = inside.filter(
    (event) => !ROUTINE.has(event.kind) || (event.epoch || 0) % stride === 0,
  );
  const newest = {};
  const apart = kept.reverse().filter((event) => {
    const near = (range[1] - range[0]) * MARKS_APART[toneOf(event)];
    const close = event.kind !== "epoch" && newest[event.kind] - place(event) < near;
    if (!close) newest[event.kind] = place(event);
    return !close;
  });
  const marked = apart.slice(0, MAX_MARKS).reverse();
  return marked.map((event) => {
    const tone = toneOf(event);
    return { x: place(event), tone, label: labelOf(event), event };
  });
}

// Where labels stand beside their lines at `at` (px): right of them, left where they would run over
// the plot's `right` edge. Those that would touch are left out: alarms first, then actions, then
// routine, newest first.
export function placeLabels(marks, at, right) {
  const placed = [];
  for (const tone of ["bad", "action", "routine"]) {
    for (let i = marks.length - 1; i >= 0; i -= 1) {
      const mark = marks[i];
      if (mark.tone !== tone || !mark.label) continue;
      const width = LABEL_CHARACTER * mark.label.length;
      const fits = at[i] + LABEL_GAP + width <= right;
      const from = fits ? at[i] + LABEL_GAP : at[i] - LABEL_GAP - width;
      const to = from + width;
      const touches = placed.some((other) => from <= other.to && to >= other.from);
      if (!touches) placed.push({ mark, from, to, anchor: fits ? "start" : "end" });
    }
  }
  return placed;
}

// Vertical lines and short labels over one chart; our own layer, as Plotly shapes would be laid out
// again with every redraw.
export class MarkLayer {
  constructor() {
    this.paths = { routine: svg("path"), action: svg("path"), bad: svg("path") };
    for (const [tone, path] of Object.entries(this.paths))
      path.setAttribute("class", `ss-mark-${tone}`);
    this.labels = svg("g");
    this.odd = svg("path", { class: "ss-odd-span" });
    const parts = [this.odd, ...Object.values(this.paths), this.labels];
    this.node = svg("svg", { class: "ss-marks", "aria-hidden": "true" }, ...parts);
    this.shown = "";
  }

  // `place` maps x to pixels; `box` is {top, bottom, left, right} of the plot area; `spans` are the
  // stretches where a line has values that are no finite numbers.
  update(marks, place, box, spans) {
    const at = marks.map((mark) => Math.round(place(mark.x)) + 0.5);
    const bands = spans.map((span) => bandOf(span, place, box));
    const places = marks.map((mark, i) => `${mark.event.id}:${at[i]}`);
    const key = [...places, ...bands.map((band) => band.path)].join();
    if (key === this.shown) return;
    this.shown = key;
    const lines = { routine: "", action: "", bad: "" };
    marks.forEach((mark, i) => (lines[mark.tone] += `M${at[i]} ${box.top}V${box.bottom}`));
    for (const [tone, path] of Object.entries(this.paths)) setAttribute(path, "d", lines[tone]);
    setAttribute(this.odd, "d", bands.map((band) => band.path).join(""));
    const all = [...bands.map((band) => band.mark), ...marks];
    const lefts = [...bands.map((band) => band.from), ...at];
    const texts = placeLabels(all, lefts, box.right).map(({ mark, from, to, anchor }) => {
      const place = { x: anchor === "start" ? from : to, y: box.top + 8, "text-anchor": anchor };
      return svg("text", { ...place, class: `ss-mark-${mark.tone}` }, mark.label);
    });
    this.labels.replaceChildren(...texts);
  }
}

// A stretch as an area of the plot, wide enough to be seen, and the word that stands beside it.
function bandOf({ from: first, to: last, word }, place, { top, bottom, left, right }) {
  const inside = (x) => Math.min(right, Math.max(left, Math.round(place(x))));
  const [from, to] = [inside(first) - 1, inside(last) + 1];
  const path = `M${from} ${top}H${to}V${bottom}H${from}Z`;
  return { from, path, mark: { label: word, tone: "bad" } };
}
