// Parts on top of each other, as the outlines of areas. Pure: no DOM.

import { breaks, visibleSpan } from "./lines.js";

// The outlines of the parts in `columns`, which are listed from the bottom to the top of the stack,
// for the part `range` of the horizontal axis. A part is null where a moment does not have it (another
// part then holds its bytes): its area ends there, and the next part stands where it would. A moment
// without any part is left out, and where they are missing for long all areas break. An area lasts
// to the next moment, so that there is no slit where one part takes the place of others; one of a
// single moment is `least` wide.
export function stackAreas(xs, columns, range, factor, times, least = 0) {
  const moments = momentsIn(xs, columns, range);
  const broken = breaks(times);
  const base = new Float64Array(xs.length);
  return columns.map((values) => {
    const out = { x: [], y: [] };
    for (const stretch of stretchesOf(values, moments, broken)) {
      if (out.x.length) push(out, xs[stretch.at[0]], null);
      outline(out, xs, values, base, factor, stretch, least);
    }
    for (const i of moments) base[i] += values[i] ?? 0;
    return out;
  });
}

// The highest stack of the columns within the range.
export function stackTop(xs, columns, range) {
  let top = 0;
  for (const i of momentsIn(xs, columns, range)) {
    let sum = 0;
    for (const values of columns) sum += values[i] ?? 0;
    top = Math.max(top, sum);
  }
  return top;
}

// Indices of the moments that have any part.
function momentsIn(xs, columns, range) {
  const [from, to] = visibleSpan(xs, range);
  const found = [];
  for (let i = from; i < to; i += 1) {
    if (columns.some((values) => values[i] !== null)) found.push(i);
  }
  return found;
}

// Runs of moments that have a value: `at` are their indices, `next` the moment after the last one,
// null where the stack breaks there.
function stretchesOf(values, moments, broken) {
  const found = [];
  let open = null;
  moments.forEach((i, place) => {
    const before = place ? moments[place - 1] : -1;
    const cut = before >= 0 && broken(before, i);
    if (open && (cut || values[i] === null)) {
      open.next = cut ? null : i;
      open = null;
    }
    if (values[i] === null) return;
    if (!open) found.push((open = { at: [], next: null }));
    open.at.push(i);
  });
  return found;
}

function outline(out, xs, values, base, factor, { at, next }, least) {
  const last = at.at(-1);
  let end = next === null ? xs[last] : xs[next];
  if (end === xs[at[0]]) end += least;
  const top = at.map((i) => [xs[i], (base[i] + values[i]) / factor]);
  const bottom = at.map((i) => [xs[i], base[i] / factor]);
  if (end > xs[last]) {
    top.push([end, top.at(-1)[1]]);
    bottom.push([end, bottom.at(-1)[1]]);
  }
  for (const side of [thin(top), thin(bottom).reverse()]) {
    for (const [x, y] of side) push(out, x, y);
  }
}

function push(out, x, y) {
  out.x.push(x);
  out.y.push(y);
}

// Leaves out points inside flat stretches: a part that stays costs two points a side.
function thin(points) {
  return points.filter(
    ([, y], i) =>
      i === 0 || i === points.length - 1 || points[i - 1][1] !== y || points[i + 1][1] !== y,
  );
}
