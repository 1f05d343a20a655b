// Events, and stretches without finite values, as Plotly shapes with short labels.

import { EVENTS, ROUTINE, isAlert, isCleared, toneOf } from "./events.js";
import { isNumber } from "./format.js";
import { withAlpha } from "./theme.js";

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

// Places labels on the right of their lines at `at` (px), on the left at the plot's `right` edge. Of
// labels that touch, failures and newer ones are kept.
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
