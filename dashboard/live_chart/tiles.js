// The number tiles, and the line that says once what this run does not have.

import { el, parts, setAttribute, setText } from "./dom.js";
import { MISSING, bytesOf, isNumber, percent, precise, withUnit } from "./format.js";
import { linePoints, oddNow, oddText } from "./lines.js";
import { latest, latestEver, latestOf, valueAt } from "./series.js";

const SPARK_POINTS = 60;

class Tile {
  constructor(spec) {
    this.spec = spec;
    // The spaces are for who reads the text, such as a screen reader.
    const tile = parts(`<div class="ss-kpi"><div class="ss-muted" ref="label"></div> <div
      class="ss-num" ref="number">–</div> <div class="ss-detail" ref="detail"></div><svg
      class="ss-spark" viewBox="0 0 100 20" preserveAspectRatio="none" aria-hidden="true"
      ref="spark"><path vector-effect="non-scaling-stroke" ref="line" /></svg></div>`);
    Object.assign(this, tile);
    setText(this.label, spec.label);
    setAttribute(this.node, "data-testid", `kpi-${spec.id}`);
    this.spark.style.color = `var(--ss-${spec.color})`;
  }

  update(live, ended) {
    const { text, reason, odd, drawn } = tileContent(this.spec, live, ended);
    const [number, detail] = text;
    this.node.hidden = this.spec.hide && !drawn;
    this.node.classList.toggle("ss-odd", odd);
    this.node.classList.toggle("ss-missing", number === MISSING);
    setText(this.number, number);
    setText(this.detail, detail);
    setAttribute(this.node, "title", reason || this.spec.title);
    if (drawn) setAttribute(this.line, "d", sparkPath(this.spec, live));
  }
}

// What a tile shows: its two lines, why a value is missing, whether it is no finite number, and
// whether there is a line to draw. Of an ended run it is the mean, the peak or the last value.
export function tileContent(spec, live, ended = false) {
  const { series, metric } = spec;
  const shown = { reason: null, odd: false, drawn: true };
  if (series.length === 1 && oddNow(live[series[0]], metric) !== null)
    return { ...shown, text: oddText(live[series[0]], metric), odd: true };
  const whole = ended && spec.ended !== "last";
  const values = whole
    ? series.map((name) => wholeRun(live[name]?.v[metric], spec.ended)).filter(isNumber)
    : latestOf(live, series, metric);
  if (whole && values.length) {
    const [number, detail] = tileText(spec, values, live);
    return { ...shown, text: [number, [detail, spec.ended].filter(Boolean).join(" · ")] };
  }
  if (values.length) return { ...shown, text: tileText(spec, values, live) };
  const reason = spec.reason || "No recent value.";
  return { ...shown, text: [MISSING, ""], reason, drawn: false };
}

// The mean or the peak of a metric over the run; null without values.
function wholeRun(column, statistic) {
  const known = (statistic === "peak" ? column?.max : column?.mean)?.filter(isNumber) ?? [];
  if (!known.length) return null;
  if (statistic === "peak") return Math.max(...known);
  return known.reduce((sum, value) => sum + value, 0) / known.length;
}

// The number alone and, for the smaller line, its unit and what belongs to it.
function tileText(spec, values, live) {
  const mean = values.reduce((sum, each) => sum + each, 0) / values.length;
  const value = mean * (spec.scale ?? 1);
  const [number, unit] = numberAndUnit(value, spec, live);
  if (spec.also) return [number, alsoText(spec.also, live.steps)];
  if (spec.series.length === 1) return [number, unit];
  const ends = [Math.min(...values), Math.max(...values)].map((end) => withUnit(end, spec.unit));
  const units = new Set(ends.map((text) => text.split(" ")[1]));
  const [low, high] = units.size === 1 ? ends.map((text) => text.split(" ")[0]) : ends;
  const some = values.length < spec.series.length;
  const of = some ? ` on ${values.length} of ${spec.series.length} GPUs` : "";
  return [number, `${unit} · ${low}–${high}${of}`];
}

function numberAndUnit(value, spec, live) {
  if (spec.unit === "B") {
    const total = spec.of && (latest(live[spec.of.series], spec.of.metric) ?? spec.of.value);
    return bytesOf(value, total);
  }
  if (spec.unit === "") return [precise(value), ""];
  const [number, unit] = withUnit(value, spec.unit).split(" ");
  return [number, spec.unit === "1/s" ? "" : unit]; // its label says so
}

// The newest validation, however long ago: "val 0.123 · 98 %".
function alsoText(keys, steps) {
  const [loss, accuracy] = keys.map((key) => latestEver(steps, key));
  const text = isNumber(loss) ? loss.toPrecision(3) : loss;
  const parts = [loss === null ? "" : `val ${text}`, isNumber(accuracy) ? percent(accuracy) : ""];
  return parts.filter(Boolean).join(" · ");
}

// The newest values (of several GPUs their mean) over their places as an SVG path; like a chart's
// line it spans what a slow sensor leaves out.
export function sparkPath({ series: names, metric }, live) {
  const held = names.map((name) => live[name]).filter((series) => series?.v[metric]);
  const times = held[0].t.slice(-SPARK_POINTS);
  const one = held.length === 1 ? held[0].v[metric] : null;
  const values = one ? one.mean.slice(-SPARK_POINTS) : times.map((t) => meanAt(held, metric, t));
  const places = values.map((_, i) => i);
  const bridged = names[0] === "steps" ? null : times;
  const { x, y } = linePoints(places, values, null, 1, bridged, one?.odd.slice(-SPARK_POINTS));
  const known = y.filter((value) => value !== null);
  const [low, high] = [Math.min(...known), Math.max(...known)];
  const height = (value) => (high > low ? 18 - (16 * (value - low)) / (high - low) : 18);
  const place = (i) => ((100 * i) / Math.max(1, values.length - 1)).toFixed(1);
  const pen = (i) => (i === 0 || y[i - 1] === null ? "M" : "L");
  const points = y.map((value, i) =>
    value === null ? "" : `${pen(i)}${place(x[i])} ${height(value).toFixed(1)}`,
  );
  return points.join("");
}

function meanAt(held, metric, time) {
  const values = held.map((series) => valueAt(series, metric, time)).filter(isNumber);
  return values.length ? values.reduce((sum, each) => sum + each, 0) / values.length : null;
}

export class TileRow {
  constructor() {
    this.row = el("div", { class: "ss-kpis" });
    this.absent = el("p", { class: "ss-absent", "data-testid": "absent", hidden: "" });
    this.node = el("div", {}, this.row, this.absent);
    this.tiles = [];
  }

  configure({ kpis, absent }) {
    this.tiles = kpis.map((spec) => new Tile(spec));
    this.row.replaceChildren(...this.tiles.map((tile) => tile.node));
    setText(this.absent, absent || "");
    this.absent.hidden = !absent;
  }

  update({ live, ended }) {
    for (const tile of this.tiles) tile.update(live, ended);
  }
}
