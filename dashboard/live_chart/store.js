// The client's copy of a run: buckets of rows per series, at most MAX_BUCKETS each. Pure: no DOM.
// A series is {bucket, end, start[], t[], s[], v: {metric: {mean[], min[], max[], odd[]}}}; bucket i
// holds rows start[i] .. start[i] + bucket - 1 and `end` is the number of rows consumed. `odd` tells
// of values that are no finite numbers (odd.js), the others leave them out.

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

// The same series in larger buckets (a new object), or itself if they are large enough.
function coarsen(series, bucket) {
  if (bucket <= series.bucket) return series;
  const groups = bucketGroups(series.start, bucket);
  const out = emptySeries(bucket);
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
  }
  return out;
}

// One series of an answer in the store's form; single rows come with `mean` only.
function fromPart(part) {
  const series = emptySeries(part.bucket);
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
function mergeSeries(held, part) {
  let series = !held || part.reset ? emptySeries(part.bucket) : coarsen(held, part.bucket);
  const fresh = coarsen(fromPart(part), series.bucket);
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

const cursorText = (all) =>
  Object.entries(all)
    .map(([name, series]) => `${name}~${series.end}~${series.bucket}`)
    .join(",");

// The newest value of a metric: the exact last one if the server sends it, else of the last bucket
// that has one among the newest five (a metric that stopped is missing, not frozen). No number where
// it is odd now.
function latest(series, key, stat = "mean") {
  if (!series || oddNow(series, key)) return null;
  if (series.last && isNumber(series.last[key])) return series.last[key];
  const values = series.v[key]?.[stat] || [];
  for (let i = values.length - 1; i >= Math.max(0, values.length - 5); i -= 1) {
    if (values[i] !== null) return values[i];
  }
  return null;
}

// The newest value however long ago, for metrics logged once an epoch; a word where it is odd.
function latestEver(series, key) {
  const { mean = [], odd = [] } = series?.v[key] || {};
  for (let i = mean.length - 1; i >= 0; i -= 1) {
    if (mean[i] !== null) return mean[i];
    if (odd[i]) return oddWord(odd[i]);
  }
  return null;
}

// First index with xs[i] >= x; xs is non-decreasing.
function bisect(xs, x) {
  let [low, high] = [0, xs.length];
  while (low < high) {
    const middle = (low + high) >> 1;
    if (xs[middle] < x) low = middle + 1;
    else high = middle;
  }
  return low;
}

// Exponential moving average without the start bias; missing values stay missing.
function ema(values, weight) {
  let [sum, norm] = [0, 0];
  return values.map((value) => {
    if (value === null) return null;
    sum = weight * sum + (1 - weight) * value;
    norm = weight * norm + (1 - weight);
    return sum / norm;
  });
}

const xsOf = (series, axis) => (axis === "time" ? series.t : series.s);

// Indices to draw for [from, to]: one more on each side, so that lines reach the edge.
function visibleSpan(xs, range) {
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

function breaks(times) {
  if (!times) return () => false;
  const spacing = times.length > 1 ? (times[times.length - 1] - times[0]) / (times.length - 1) : 0;
  const limit = Math.max(BRIDGE_S, 3 * spacing);
  return (from, to) => from >= 0 && times[to] - times[from] > limit;
}

// Points of a line through `values`; with `times` (s) it breaks where values are missing for long,
// with `odd` where they were no finite numbers.
function linePoints(xs, values, range, factor, times, odd) {
  const out = { x: [], y: [] };
  const [from, to] = visibleSpan(xs, range);
  const broken = breaks(times);
  let held = -1;
  let wasOdd = false;
  for (let i = from; i < to; i += 1) {
    wasOdd ||= Boolean(odd?.[i]);
    if (values[i] === null) continue;
    if (held >= 0 && (wasOdd || broken(held, i))) pushThin(out, xs[held], null);
    pushThin(out, xs[i], values[i] / factor);
    wasOdd = false;
    held = i;
  }
  return out;
}

// Minimum and maximum of every bucket as one zigzag line, nearest end first: nothing that happened
// inside a bucket is lost, at no more than two points each.
function envelopePoints(xs, column, range, factor, times) {
  const out = { x: [], y: [] };
  const [from, to] = visibleSpan(xs, range);
  const broken = breaks(times);
  let held = -1;
  let last = null;
  let wasOdd = false;
  for (let i = from; i < to; i += 1) {
    const [low, high] = [column.min[i], column.max[i]];
    wasOdd ||= Boolean(column.odd?.[i]);
    if (low === null) continue;
    if (held >= 0 && (wasOdd || broken(held, i))) pushThin(out, xs[held], null);
    const ends =
      last !== null && Math.abs(last - high) < Math.abs(last - low) ? [high, low] : [low, high];
    pushThin(out, xs[i], ends[0] / factor);
    if (low !== high) pushThin(out, xs[i], ends[1] / factor);
    last = ends[1];
    wasOdd = false;
    held = i;
  }
  return out;
}

// Converts a step to a time or back along a series; the ends are held.
function convertX(series, axis, x) {
  if (!series || !series.t.length) return x;
  const [from, to] = axis === "time" ? [series.s, series.t] : [series.t, series.s];
  const i = bisect(from, x);
  if (i === 0) return to[0];
  if (i >= from.length) return to[from.length - 1];
  const span = from[i] - from[i - 1];
  return span > 0 ? to[i - 1] + ((x - from[i - 1]) / span) * (to[i] - to[i - 1]) : to[i];
}

// Seconds left by the mean step time of the newest buckets (pauses and validation are not in it);
// null before it can be known. The very first steps (warm-up) are left out once others exist.
function secondsLeft(steps, progress) {
  const total = progress?.total_steps;
  const values = steps?.v["perf/step_time"]?.mean;
  if (!isNumber(total) || !values || values.length < 5) return null;
  const recent = values.slice(Math.max(2, values.length - 50)).filter((value) => value !== null);
  if (!recent.length) return null;
  const mean = recent.reduce((sum, value) => sum + value, 0) / recent.length;
  return Math.max(0, total - progress.step) * mean;
}
