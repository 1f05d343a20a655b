// Values that were recorded and are no finite numbers: a gap with a mark, not a missing value. A
// column's `odd` says where: null, the value as a word (a single row) or how many a bucket has.

const ODD_WORDS = { NaN: "NaN", Infinity: "inf", "-Infinity": "−inf" };

// What to call an entry of `odd`.
const oddWord = (odd) => ODD_WORDS[odd] || "NaN/inf";

// The word for the newest value of a metric if that is odd, else null.
function oddNow(series, key) {
  const last = series?.last?.[key];
  return typeof last === "string" ? oddWord(last) : null;
}

// A tile's two lines for a metric that is odd now.
function oddText(series, key) {
  const since = series.since?.[key];
  const detail = isNumber(since) ? `since step ${since.toLocaleString("en-US")}` : "";
  return [oddNow(series, key), detail];
}

// Whether there is a finite value; whether anything was recorded at all.
const holds = (column) => Boolean(column) && column.mean.some((value) => value !== null);
const recorded = (column) => Boolean(column) && (holds(column) || column.odd.some(Boolean));

// Stretches of x in which a column is odd as {from, to, word}: they end at the next finite value.
function oddSpans(xs, column, range) {
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
