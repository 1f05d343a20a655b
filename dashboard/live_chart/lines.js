// From a series to the points of a line, without DOM.

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
export function breaks(times) {
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

// Indices of the buckets with values, in stretches between which a line breaks: with `times` (s)
// where values are missing for long, with `odd` where values were not finite.
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

// Converts a step to a time, or back, by a series. A place outside becomes its end.
export function convertX(series, axis, x) {
  if (!series || !series.t.length) return x;
  const [from, to] = axis === "time" ? [series.s, series.t] : [series.t, series.s];
  const i = bisect(from, x);
  if (i === 0) return to[0];
  if (i >= from.length) return to[from.length - 1];
  const span = from[i] - from[i - 1];
  return span > 0 ? to[i - 1] + ((x - from[i - 1]) / span) * (to[i] - to[i - 1]) : to[i];
}

// A column's `odd` has one entry per bucket: null, the value as a word (a single row), or a count.

const ODD_WORDS = { NaN: "NaN", Infinity: "inf", "-Infinity": "−inf" };

// The text of an entry of `odd`.
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

// The word of a metric's newest value if that is not finite, else null.
export function oddNow(series, key) {
  const last = series?.last?.[key];
  return typeof last === "string" ? oddWord(last) : null;
}

// True if a column has a finite value; true if it has any recorded value.
export const holds = (column) => Boolean(column) && column.mean.some((value) => value !== null);
export const recorded = (column) => Boolean(column) && (holds(column) || column.odd.some(Boolean));
