// The client's copy of a run: buckets of rows per series, at most MAX_BUCKETS each. Pure: no DOM.
// A series is {bucket, end, start[], t[], s[], v: {metric: {mean[], min[], max[], odd[]}}}; bucket i
// holds rows start[i] .. start[i] + bucket - 1 and `end` is the number of rows consumed. `odd` tells
// of values that are no finite numbers (lines.js), the others leave them out. In a series that is a
// `stack` the metrics are parts of one sum: where one is null while others are not, it has no share.

import { isNumber } from "./format.js";
import { bisect, oddNow, oddWord } from "./lines.js";

const MAX_BUCKETS = 500;
const STATS = ["mean", "min", "max", "odd"];

const emptySeries = (bucket) => ({ bucket, end: 0, start: [], t: [], s: [], v: {} });

// Index ranges [from, to) of the held buckets that fall into one bucket of the new size.
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

// One value of a group; null where all are missing. Means weigh equally: rows per bucket differ
// only in the last one, which the server replaces.
function reduceGroup(values, { from, to }, stat) {
  let result = null;
  let count = 0;
  for (let i = from; i < to; i += 1) {
    const value = values[i];
    if (value === null) continue;
    count += stat === "odd" && isNumber(value) ? value : 1;
    if (result === null) result = value;
    else if (stat === "mean") result += value;
    else result = stat === "min" ? Math.min(result, value) : Math.max(result, value);
  }
  if (stat === "odd") return count || null;
  return stat === "mean" && count > 1 ? result / count : result;
}

// The mean of a part over the rows of a group that have any part, so that the parts keep their sum.
function meanShare(series, key, { from, to }) {
  const columns = Object.values(series.v);
  let [sum, known, rows] = [0, false, 0];
  for (let i = from; i < to; i += 1) {
    const value = series.v[key].mean[i];
    known ||= value !== null;
    sum += value ?? 0;
    rows += columns.some(({ mean }) => mean[i] !== null);
  }
  return known ? sum / rows : null;
}

// The same series in larger buckets (a new object), or itself if they are large enough.
export function coarsen(series, bucket) {
  if (bucket <= series.bucket) return series;
  const groups = bucketGroups(series.start, bucket);
  const out = emptySeries(bucket);
  out.stack = series.stack;
  out.end = series.end;
  out.last = series.last;
  out.since = series.since;
  out.start = groups.map((group) => group.first);
  out.t = groups.map((group) => series.t[group.to - 1]);
  out.s = groups.map((group) => series.s[group.to - 1]);
  for (const key of Object.keys(series.v)) {
    out.v[key] = {};
    for (const stat of STATS) {
      out.v[key][stat] = groups.map((group) => reduceGroup(series.v[key][stat], group, stat));
    }
    if (series.stack) out.v[key].mean = groups.map((group) => meanShare(series, key, group));
  }
  return out;
}

// One series of an answer in the store's form; single rows come with `mean` only.
function fromPart(part) {
  const series = emptySeries(part.bucket);
  series.stack = part.stack;
  series.end = part.end;
  series.t = part.t;
  series.s = part.s;
  series.start = part.t.map((_, i) => part.first + i * part.bucket);
  for (const [key, { mean, min, max, odd }] of Object.entries(part.v)) {
    const none = () => new Array(mean.length).fill(null);
    series.v[key] = { mean, min: min || mean, max: max || mean, odd: odd || none() };
  }
  return series;
}

function appendColumn(held, fresh, kept, added) {
  const column =
    held || Object.fromEntries(STATS.map((stat) => [stat, new Array(kept).fill(null)]));
  for (const stat of STATS) {
    column[stat].length = kept;
    for (let i = 0; i < added; i += 1) column[stat].push(fresh ? fresh[stat][i] : null);
  }
  return column;
}

// Merges one series of an answer: held buckets from its first row on are replaced, the rest is
// appended. Idempotent. Changes `held` in place and returns the series to keep.
export function mergeSeries(held, part) {
  let series = !held || part.reset ? emptySeries(part.bucket) : coarsen(held, part.bucket);
  const fresh = coarsen(fromPart(part), series.bucket);
  series.stack = fresh.stack;
  const cut = fresh.start.length ? fresh.start[0] : part.first;
  let kept = series.start.length;
  while (kept > 0 && series.start[kept - 1] >= cut) kept -= 1;
  for (const name of ["start", "t", "s"]) {
    series[name].length = kept;
    series[name].push(...fresh[name]);
  }
  for (const key of new Set([...Object.keys(series.v), ...Object.keys(fresh.v)])) {
    series.v[key] = appendColumn(series.v[key], fresh.v[key], kept, fresh.start.length);
  }
  series.end = part.end;
  series.last = part.last || null;
  series.since = part.since || null;
  while (series.start.length > MAX_BUCKETS) series = coarsen(series, series.bucket * 2);
  return series;
}

export const cursorText = (all) =>
  Object.entries(all)
    .map(([name, series]) => `${name}~${series.end}~${series.bucket}`)
    .join(",");

// The newest value of a metric: the exact last one if the server sends it, else of the last bucket
// that has one among the newest five (a metric that stopped is missing, not frozen). No number where
// it is odd now.
export function latest(series, key, stat = "mean") {
  if (!series || oddNow(series, key)) return null;
  if (series.last && isNumber(series.last[key])) return series.last[key];
  const values = series.v[key]?.[stat] || [];
  for (let i = values.length - 1; i >= Math.max(0, values.length - 5); i -= 1) {
    if (values[i] !== null) return values[i];
  }
  return null;
}

// The newest values of a metric in several series, those that have none left out; of a peak the
// highest of the newest bucket.
export function latestOf(live, names, key) {
  const stat = key.includes("peak") ? "max" : "mean";
  return names.map((name) => latest(live[name], key, stat)).filter(isNumber);
}

// The value of a metric at a time, or before it where a slow sensor left that row out; else null.
export function valueAt(series, key, time) {
  const values = series.v[key].mean;
  const at = Math.min(bisect(series.t, time), values.length - 1);
  for (let i = at; i >= Math.max(0, at - 10); i -= 1) if (values[i] !== null) return values[i];
  return null;
}

// The newest value however long ago, for metrics logged once an epoch; a word where it is odd.
export function latestEver(series, key) {
  const { mean = [], odd = [] } = series?.v[key] || {};
  for (let i = mean.length - 1; i >= 0; i -= 1) {
    if (mean[i] !== null) return mean[i];
    if (odd[i]) return oddWord(odd[i]);
  }
  return null;
}

// Seconds left by the mean step time of the newest buckets (pauses and validation are not in it);
// null before it can be known. The very first steps (warm-up) are left out once others exist.
export function secondsLeft(steps, progress) {
  const total = progress?.total_steps;
  const values = steps?.v["perf/step_time"]?.mean;
  if (!isNumber(total) || !values || values.length < 5) return null;
  const recent = values.slice(Math.max(2, values.length - 50)).filter((value) => value !== null);
  if (!recent.length) return null;
  const mean = recent.reduce((sum, value) => sum + value, 0) / recent.length;
  return Math.max(0, total - progress.step) * mean;
}
