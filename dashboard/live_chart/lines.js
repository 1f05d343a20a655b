// From a series to the points that are drawn. Pure: no DOM.

import { isNumber } from "./format.js";

// First index with xs[i] >= x; xs is non-decreasing.
export function bisect(xs, x) {
  let [low, high] = [0, xs.length];
  while (low < high) {
    const middle = (low + high) >> 1;
    if (xs[middle] < x) low = middle + 1;
    else high = middle;
  }
  return low;
}

// Exponential moving average without the start bias; missing values stay missing.
export function ema(values, weight) {
  let [sum, norm] = [0, 0];
  return values.map((value) => {
    if (value === null) return null;
    sum = weight * sum + (1 - weight) * value;
    norm = weight * norm + (1 - weight);
    return sum / norm;
  });
}

export const xsOf = (series, axis) => (axis === "time" ? series.t : series.s);

// Indices to draw for [from, to]: one more on each side, so that lines reach the edge.
export function visibleSpan(xs, range) {
  if (!range) return [0, xs.length];
  let to = bisect(xs, range[1]);
  while (to < xs.length && xs[to] <= range[1]) to += 1; // a validation shares its step with a row before
  return [Math.max(0, bisect(xs, range[0]) - 1), Math.min(xs.length, to + 1)];
}

// Drops points inside flat stretches: a constant line costs two points, not a thousand.
function pushThin(out, x, y) {
  const n = out.y.length;
  if (n > 1 && out.y[n - 1] === y && out.y[n - 2] === y) out.x[n - 1] = x;
  else {
    out.x.push(x);
    out.y.push(y);
  }
}

// Says where a line must break: values further apart than slow sensors answer (once a second).
const BRIDGE_S = 2.5;

export function breaks(times) {
  if (!times) return () => false;
  const spacing = times.length > 1 ? (times[times.length - 1] - times[0]) / (times.length - 1) : 0;
  const limit = Math.max(BRIDGE_S, 3 * spacing);
  return (from, to) => from >= 0 && times[to] - times[from] > limit;
}

// Points of a line through `values`, with a null between two stretches.
export function linePoints(xs, values, range, factor, times, odd) {
  const out = { x: [], y: [] };
  let held = null;
  for (const stretch of stretches(xs, values, range, times, odd)) {
    if (held !== null) pushThin(out, xs[held], null);
    for (const i of stretch) pushThin(out, xs[i], values[i] / factor);
    held = stretch.at(-1);
  }
  return out;
}

// The area between minimum and maximum as closed outlines, one for each unbroken stretch.
export function bandPoints(xs, column, range, factor, times) {
  const out = { x: [], y: [] };
  for (const stretch of stretches(xs, column.min, range, times, column.odd)) {
    const [top, bottom] = [
      { x: [], y: [] },
      { x: [], y: [] },
    ];
    for (const i of stretch) pushThin(top, xs[i], column.max[i] / factor);
    for (const i of stretch.reverse()) pushThin(bottom, xs[i], column.min[i] / factor);
    if (out.x.length) pushThin(out, top.x[0], null);
    out.x.push(...top.x, ...bottom.x);
    out.y.push(...top.y, ...bottom.y);
  }
  return out;
}

// Indices of the buckets with values, in stretches between which a line breaks: with `times` (s)
// where values are missing for long, with `odd` where they were no finite numbers.
export function stretches(xs, values, range, times, odd) {
  const found = [];
  const [from, to] = visibleSpan(xs, range);
  const broken = breaks(times);
  let held = -1;
  let wasOdd = false;
  for (let i = from; i < to; i += 1) {
    wasOdd ||= Boolean(odd?.[i]);
    if (values[i] === null) continue;
    if (held < 0 || wasOdd || broken(held, i)) found.push([]);
    found.at(-1).push(i);
    wasOdd = false;
    held = i;
  }
  return found;
}

// Converts a step to a time or back along a series; the ends are held.
export function convertX(series, axis, x) {
  if (!series || !series.t.length) return x;
  const [from, to] = axis === "time" ? [series.s, series.t] : [series.t, series.s];
  const i = bisect(from, x);
  if (i === 0) return to[0];
  if (i >= from.length) return to[from.length - 1];
  const span = from[i] - from[i - 1];
  return span > 0 ? to[i - 1] + ((x - from[i - 1]) / span) * (to[i] - to[i - 1]) : to[i];
}

// Stretches of x in which a column is odd as {from, to, word}: they end at the next finite value.
export function oddSpans(xs, column, range) {
  const spans = [];
  const [start, stop] = visibleSpan(xs, range);
  let open = null;
  for (let i = start; i < stop; i += 1) {
    const odd = column.odd[i];
    if (odd) {
      if (!open) spans.push((open = { from: xs[i], to: xs[i], word: oddWord(odd) }));
      open.to = xs[i];
    } else if (column.mean[i] !== null) open = null;
  }
  return spans;
}

// --- values that were recorded and are no finite numbers: a gap with a mark, not a missing value ---
// A column's `odd` has where: null, the value as a word (a single row) or how many a bucket has.

const ODD_WORDS = { NaN: "NaN", Infinity: "inf", "-Infinity": "−inf" };

// What to call an entry of `odd`.
export const oddWord = (odd) => ODD_WORDS[odd] || "NaN/inf";

// The word for the newest value of a metric if that is odd, else null.
export function oddNow(series, key) {
  const last = series?.last?.[key];
  return typeof last === "string" ? oddWord(last) : null;
}

// A tile's two lines for a metric that is odd now.
export function oddText(series, key) {
  const since = series.since?.[key];
  const detail = isNumber(since) ? `since step ${since.toLocaleString("en-US")}` : "";
  return [oddNow(series, key), detail];
}

// Whether there is a finite value; whether anything was recorded at all.
export const holds = (column) => Boolean(column) && column.mean.some((value) => value !== null);
export const recorded = (column) => Boolean(column) && (holds(column) || column.odd.some(Boolean));
