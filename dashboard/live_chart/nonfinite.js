// Values that were recorded and are no finite numbers: a gap with a mark, not a missing value. A
// column's `odd` says where: null, the value as a word (a single row) or how many a bucket has.

import { isNumber } from "./format.js";

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
