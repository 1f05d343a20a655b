// Events, and stretches of values that are no finite numbers, as Plotly shapes with short labels.

import { EVENTS, ROUTINE, toneOf } from "./events.js";
import { isNumber } from "./format.js";
import { withAlpha } from "./theme.js";
import { isAlert, isOver } from "./toasts.js";

const MAX_MARKS = 60;
const MAX_EPOCH_MARKS = 12;
// Parts of the range, at least, between two marks of a kind.
const MARKS_APART = { bad: 1 / 80, action: 1 / 80, routine: 1 / 12 };
const LABEL_CHARACTER = 5.5; // px, at most
const LABEL_GAP = 3; // px from the line

function labelOf(event) {
  if (event.kind === "epoch") return `e${event.epoch ?? ""}`;
  if (isAlert(event) && isOver(event)) return "";
  return EVENTS[event.kind]?.[1] ?? event.kind;
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
      if (!touches) placed.push({ mark, from, to, anchor: fits ? "left" : "right" });
    }
  }
  return placed;
}

// The `shapes` and `annotations` of a layout for marks and for `spans` {from, to, word} of values that
// are not finite. `place` maps x to pixels; `right` is the plot's edge.
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
  const placed = placeLabels(
    all,
    all.map(({ x }) => place(x)),
    right,
  );
  const annotations = placed.map(({ mark: { x, label, tone }, anchor }) => ({
    ...{ x, y: 1, yref: "paper", yanchor: "top", xanchor: anchor, text: label, showarrow: false },
    font: { size: 9.5, color: tone === "bad" ? orange : theme.text },
  }));
  return { shapes, annotations };
}
