// The chart of the memory breakdown: parts stacked up to the total.

import { Card } from "./card.js";
import { sum } from "./format.js";
import { breaks, holds, visibleSpan, xsOf } from "./lines.js";
import { thinned } from "./series.js";

const MIN_MOMENT_PX = 2;
const SINGLE_MOMENT_PX = 3;

const isPart = (trace) => trace.style === "part";

// Indices of the moments in the range that have any part.
function momentsIn(xs, columns, range) {
  const [from, to] = visibleSpan(xs, range);
  return Array.from({ length: to - from }, (_, i) => from + i).filter((i) =>
    columns.some((values) => values[i] !== null),
  );
}

// Returns the stack as {x, ys} for Plotly's stackgroup. A moment without any part is skipped; a long
// gap ends the stack. A single moment is `width` wide. A missing part is zero: another part then
// includes its bytes.
export function stacked(xs, columns, range, factor, times, width = 0) {
  const broken = breaks(times);
  const [x, ys] = [[], columns.map(() => [])];
  const add = (at, valueOf) => {
    x.push(at);
    columns.forEach((values, part) => ys[part].push(valueOf(values)));
  };
  let held = -1;
  const moments = momentsIn(xs, columns, range);
  for (const i of moments) {
    if (held >= 0 && broken(held, i)) for (const at of [held, i]) add(xs[at], () => 0);
    add(xs[i], (values) => (values[i] ?? 0) / factor);
    held = i;
  }
  if (moments.length === 1) add(xs[held] + width, (values) => (values[held] ?? 0) / factor);
  return { x, ys };
}

export function stackTop(xs, columns, range) {
  const sums = momentsIn(xs, columns, range).map((i) => sum(columns.map((values) => values[i])));
  return Math.max(0, ...sums);
}

export class BreakdownCard extends Card {
  // Without "full scale": the row of the free memory in the table does the same.
  buttons() {
    return super.buttons().filter((node) => node !== this.full);
  }

  get parts() {
    const shown = (trace) => isPart(trace) && !this.hidden(trace) && holds(this.column(trace));
    return this.spec.traces.filter(shown).reverse();
  }

  top() {
    const series = this.store.source("ledger");
    if (!series) return 0;
    const columns = this.parts.map((trace) => series.v[trace.metric].mean);
    return stackTop(xsOf(series, this.store.axis), columns, this.store.range);
  }

  traces(factors) {
    const { parts, store } = this;
    if (!parts.length) return [];
    const { axis, range } = store;
    const count = this.plotWidth / MIN_MOMENT_PX;
    const series = thinned(store.source("ledger"), axis, range, count);
    const columns = parts.map((trace) => series.v[trace.metric].mean);
    const width = (SINGLE_MOMENT_PX * (range[1] - range[0])) / this.plotWidth;
    const { x, ys } = stacked(xsOf(series, axis), columns, range, factors.y, series.t, width);
    const { palette, background } = this.scene.theme;
    const areas = parts.map(({ label, color }, i) => ({
      ...{ type: "scatter", mode: "lines", name: label, hoverinfo: "skip", x, y: ys[i] },
      ...{ stackgroup: "parts", fillcolor: palette[color] },
      line: { width: 0.6, color: background },
    }));
    const total = this.spec.traces.filter((trace) => !isPart(trace));
    return [...areas, ...total.flatMap((trace) => this.drawn(trace, factors.y))];
  }
}
