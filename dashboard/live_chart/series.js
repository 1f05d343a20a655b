// The browser's copy of a series: buckets of rows, at most MAX_BUCKETS. No DOM.
// A series is {bucket, end, start[], t[], s[], v: {metric: {mean[], min[], max[], count[], odd[]}}};
// bucket i holds rows start[i] .. start[i] + bucket - 1, and `end` is the number of rows received.
// `odd` counts values that are not finite; the other statistics exclude them.

import { isNumber, sum } from "./format.js";

const MAX_BUCKETS = 500;
const MAX_AGE_BUCKETS = 5; // a metric without a value in the newest ones is missing
const STATS = ["mean", "min", "max", "count", "odd"];

const emptySeries = (bucket) => ({ bucket, end: 0, start: [], t: [], s: [], v: {} });
const nulls = (count) => new Array(count).fill(null);

// Index ranges [from, to) of the buckets that become one bucket of the new size.
function bucketGroups(start, bucket) {
  const groups = [];
  for (let i = 0; i < start.length; i += 1) {
    const first = Math.floor(start[i] / bucket) * bucket;
    const last = groups[groups.length - 1];
    if (last && last.first === first) last.to = i + 1;
    else groups.push({ first, from: i, to: i + 1 });
  }
  return groups;
}

// The mean of the values in buckets, each with its number of values; null without values.
export function weightedMean(mean, count) {
  const total = sum(count);
  return total ? sum(mean.map((value, i) => value * count[i])) / total : null;
}

// One statistic of a group, null without values.
function reduceGroup(column, { from, to }, stat) {
  const values = column[stat].slice(from, to);
  if (stat === "mean") return weightedMean(values, column.count.slice(from, to));
  const known = values.filter((value) => value !== null);
  if (!known.length) return null;
  if (stat === "min") return Math.min(...known);
  if (stat === "max") return Math.max(...known);
  return sum(known.map((value) => (isNumber(value) ? value : 1))); // a single odd row is a word
}

// Returns the series in larger buckets, or the same object if its buckets are large enough.
export function coarsen(series, bucket) {
  if (bucket <= series.bucket) return series;
  const groups = bucketGroups(series.start, bucket);
  const last = (values) => groups.map((group) => values[group.to - 1]);
  const start = groups.map((group) => group.first);
  const out = { ...series, bucket, start, t: last(series.t), s: last(series.s), v: {} };
  for (const key of Object.keys(series.v)) {
    out.v[key] = {};
    for (const stat of STATS)
      out.v[key][stat] = groups.map((group) => reduceGroup(series.v[key], group, stat));
  }
  return out;
}

// Returns the series with at most about `count` buckets in a range of the axis.
export function thinned(series, axis, range, count) {
  const [from, to] = visibleSpan(xsOf(series, axis), range);
  const factor = 2 ** Math.max(0, Math.ceil(Math.log2((to - from) / count)));
  return coarsen(series, series.bucket * factor);
}

// Converts one series of an answer; single rows have `mean` only.
function fromPart({ bucket, end, t, s, first, v }) {
  const series = { ...emptySeries(bucket), end, t, s };
  series.start = t.map((_, i) => first + i * bucket);
  for (const [key, column] of Object.entries(v)) {
    const { mean } = column;
    const count = mean.map((value) => Number(value !== null));
    series.v[key] = { min: mean, max: mean, count, odd: nulls(mean.length), ...column };
  }
  return series;
}

// Merges one series of an answer into `held`, in place: replaces buckets from its first row on and
// appends the others; returns the series to keep. Idempotent.
export function mergeSeries(held, part) {
  let series = !held || part.reset ? emptySeries(part.bucket) : coarsen(held, part.bucket);
  const fresh = coarsen(fromPart(part), series.bucket);
  const cut = fresh.start.length ? fresh.start[0] : part.first;
  let kept = series.start.length;
  while (kept > 0 && series.start[kept - 1] >= cut) kept -= 1;
  const append = (values, added) => {
    values.length = kept;
    values.push(...added);
  };
  for (const name of ["start", "t", "s"]) append(series[name], fresh[name]);
  for (const key of new Set([...Object.keys(series.v), ...Object.keys(fresh.v)])) {
    series.v[key] ??= Object.fromEntries(STATS.map((stat) => [stat, nulls(kept)]));
    const none = nulls(fresh.start.length);
    for (const stat of STATS) append(series.v[key][stat], fresh.v[key]?.[stat] ?? none);
  }
  const { end, last = null } = part;
  Object.assign(series, { end, last });
  while (series.start.length > MAX_BUCKETS) series = coarsen(series, series.bucket * 2);
  return series;
}

export const cursorText = (all) =>
  Object.entries(all)
    .map(([name, series]) => `${name}~${series.end}~${series.bucket}`)
    .join(",");

// Returns the newest value of a metric; null if it is old, missing or not finite.
export function latest(series, key, stat = "mean") {
  if (!series || oddNow(series, key)) return null;
  if (series.last && isNumber(series.last[key])) return series.last[key];
  const recent = series.v[key]?.[stat].slice(-MAX_AGE_BUCKETS) ?? [];
  return recent.findLast((value) => value !== null) ?? null;
}

// Returns the newest known values of a metric in several series, of a peak the highest of a bucket.
export function latestOf(live, names, key) {
  const stat = key.includes("peak") ? "max" : "mean";
  return names.map((name) => latest(live[name], key, stat)).filter(isNumber);
}

// Returns the newest value of any age, for metrics with one value per epoch; a word if not finite.
export function latestEver(series, key) {
  const { mean = [], odd = [] } = series?.v[key] || {};
  const i = mean.findLastIndex((value, at) => value !== null || odd[at]);
  return i < 0 ? null : (mean[i] ?? oddWord(odd[i]));
}

// Returns the seconds left by the newest step times, without warm-up, pauses and validation; null
// with fewer than five buckets.
export function secondsLeft(steps, progress) {
  const total = progress?.total_steps;
  const values = steps?.v["perf/step_time"]?.mean;
  if (!isNumber(total) || !values || values.length < 5) return null;
  const recent = values.slice(Math.max(2, values.length - 50)).filter((value) => value !== null);
  if (!recent.length) return null;
  return Math.max(0, total - progress.step) * (sum(recent) / recent.length);
}

// From a series to the points of a line.

// The longest gap that a line bridges: slow sensors have a value per second.
const MAX_BRIDGE_S = 2.5;

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
  let [total, norm] = [0, 0];
  return values.map((value) => {
    if (value === null) return null;
    total = weight * total + (1 - weight) * value;
    norm = weight * norm + (1 - weight);
    return total / norm;
  });
}

export const xsOf = (series, axis) => (axis === "time" ? series.t : series.s);

// Indices [from, to) to draw in a range, with one more on each side: lines reach the edge.
export function visibleSpan(xs, range) {
  if (!range) return [0, xs.length];
  let to = bisect(xs, range[1]);
  while (to < xs.length && xs[to] <= range[1]) to += 1; // a validation has the step of a row before
  return [Math.max(0, bisect(xs, range[0]) - 1), Math.min(xs.length, to + 1)];
}

// Returns a function that is true for two indices between which values are missing for long.
function breaks(times) {
  if (!times) return () => false;
  const spacing = times.length > 1 ? (times[times.length - 1] - times[0]) / (times.length - 1) : 0;
  const limit = Math.max(MAX_BRIDGE_S, 3 * spacing);
  return (from, to) => from >= 0 && times[to] - times[from] > limit;
}

export function linePoints(xs, values, range, factor, times, odd) {
  const [x, y] = [[], []];
  for (const stretch of stretches(xs, values, range, times, odd)) {
    if (x.length) {
      x.push(x.at(-1));
      y.push(null);
    }
    x.push(...stretch.map((i) => xs[i]));
    y.push(...stretch.map((i) => values[i] / factor));
  }
  return { x, y };
}

// The area between minimum and maximum as closed outlines, one for each stretch.
export function bandPoints(xs, column, range, factor, times) {
  const [x, y] = [[], []];
  for (const stretch of stretches(xs, column.min, range, times, column.odd)) {
    const back = stretch.toReversed();
    if (x.length) {
      x.push(xs[stretch[0]]);
      y.push(null);
    }
    x.push(...[...stretch, ...back].map((i) => xs[i]));
    y.push(...stretch.map((i) => column.max[i] / factor));
    y.push(...back.map((i) => column.min[i] / factor));
  }
  return { x, y };
}

// Indices of buckets with values, in stretches: a line breaks after long `times` (s), and at `odd`.
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

// A column's `odd` has one entry per bucket: null, the value as a word (a single row), or a count.

const ODD_WORDS = { NaN: "NaN", Infinity: "inf", "-Infinity": "−inf" };

export const oddWord = (odd) => ODD_WORDS[odd] || "NaN/inf";

// Stretches of x without finite values as {from, to, word}: they end at the next finite value.
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

export function oddNow(series, key) {
  const last = series?.last?.[key];
  return typeof last === "string" ? oddWord(last) : null;
}

// True if a column has a finite value; true if it has any recorded value.
export const holds = (column) => Boolean(column) && column.mean.some((value) => value !== null);
export const recorded = (column) => Boolean(column) && (holds(column) || column.odd.some(Boolean));
