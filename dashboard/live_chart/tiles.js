// The number tiles, and the line that names the metrics that this run lacks.

import { el, parts, render, setAttribute, setText, showText } from "./dom.js";
import { MISSING, bytesOf, isNumber, percent, precise, sum, withUnit } from "./format.js";
import { latest, latestEver, latestOf, linePoints, oddNow, weightedMean } from "./series.js";

const SPARK_POINTS = 60;

const mean = (values) => sum(values) / values.length;

function tile(spec, live, ended) {
  const { text, reason, odd, drawn } = tileContent(spec, live, ended);
  const [number, detail] = text;
  // The spaces separate the texts for screen readers.
  const { node, label, value, unit, spark, line } = parts(`<div class="ss-box ss-kpi"><div
    class="ss-muted" ref="label"></div> <div class="ss-num" ref="value"></div> <div
    class="ss-muted ss-detail" ref="unit"></div><svg class="ss-spark" viewBox="0 0 100 20"
    preserveAspectRatio="none" aria-hidden="true" ref="spark"><path
    vector-effect="non-scaling-stroke" ref="line" /></svg></div>`);
  spark.style.color = `var(--ss-${spec.color})`;
  node.dataset.testid = `kpi-${spec.id}`;
  node.title = reason || spec.title;
  node.hidden = spec.hide && !drawn;
  node.classList.toggle("ss-odd", odd);
  node.classList.toggle("ss-missing", number === MISSING);
  setText(label, spec.label);
  setText(value, number);
  setText(unit, detail);
  const [name, ...others] = spec.series;
  if (drawn && !others.length)
    setAttribute(line, "d", sparkPath(live[name], spec.metric, name !== "steps"));
  return node;
}

// Returns {text, reason, odd, drawn} of a tile: its two lines, why a value is missing, true if it is
// not finite, true with a sparkline. An ended run has the mean, peak or last value.
export function tileContent(spec, live, ended = false) {
  const { series, metric } = spec;
  const shown = { reason: null, odd: false, drawn: true };
  if (series.length === 1 && oddNow(live[series[0]], metric) !== null)
    return { ...shown, text: [oddNow(live[series[0]], metric), ""], odd: true };
  if (ended && spec.ended !== "last") {
    const columns = series.map((name) => live[name]?.v[metric]).filter(Boolean);
    const means = columns.map((column) => wholeRun(column, spec.ended)).filter(isNumber);
    const values = isNumber(spec.whole) ? [spec.whole] : means;
    const [number, detail] = values.length ? tileText(spec, values, live) : [];
    if (number)
      return { ...shown, text: [number, [detail, spec.ended].filter(Boolean).join(" · ")] };
  }
  const values = latestOf(live, series, metric);
  if (values.length) return { ...shown, text: tileText(spec, values, live) };
  const reason = spec.reason || "No recent value.";
  return { ...shown, text: [MISSING, ""], reason, drawn: false };
}

// The mean or the peak of a metric over the run; not finite without values.
const wholeRun = ({ mean, max, count }, statistic) =>
  statistic === "peak" ? Math.max(...max.filter(isNumber)) : weightedMean(mean, count);

// The number, and for the smaller line its unit and what refines the number.
function tileText(spec, values, live) {
  const value = mean(values) * (spec.scale ?? 1);
  const [number, unit] = numberAndUnit(value, spec, live);
  if (spec.also) return [number, validationText(spec.also, live.steps)];
  if (spec.series.length === 1) return [number, unit];
  const ends = [Math.min(...values), Math.max(...values)].map((end) => withUnit(end, spec.unit));
  const units = new Set(ends.map((text) => text.split(" ")[1]));
  const [low, high] = units.size === 1 ? ends.map((text) => text.split(" ")[0]) : ends;
  const some = values.length < spec.series.length;
  const of = some ? ` on ${values.length} of ${spec.series.length} GPUs` : "";
  const range = `${low.replace("%", "")}–${high}${of}`;
  return [number, unit ? `${unit} · ${range}` : range];
}

function numberAndUnit(value, spec, live) {
  if (spec.unit === "B") {
    const total = spec.of && (latest(live[spec.of.series], spec.of.metric) ?? spec.of.value);
    return bytesOf(value, total);
  }
  if (spec.unit === "") return [precise(value), ""];
  const [number, unit = ""] = withUnit(value, spec.unit).split(" ");
  return [number, spec.unit === "1/s" ? "" : unit]; // the label has it
}

// The newest validation of any age: "val 0.123 · 98%".
function validationText(keys, steps) {
  const [loss, accuracy] = keys.map((key) => latestEver(steps, key));
  const text = isNumber(loss) ? loss.toPrecision(3) : loss;
  const parts = [loss === null ? "" : `val ${text}`, isNumber(accuracy) ? percent(accuracy) : ""];
  return parts.filter(Boolean).join(" · ");
}

// The newest values of a series as an SVG path, which bridges the gaps of slow sensors.
export function sparkPath({ t, v }, metric, bridges) {
  const [values, odd] = [v[metric].mean, v[metric].odd].map((all) => all.slice(-SPARK_POINTS));
  const places = values.map((_, i) => i);
  const times = bridges ? t.slice(-SPARK_POINTS) : null;
  const { x, y } = linePoints(places, values, null, 1, times, odd);
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

export class TileRow {
  constructor() {
    this.row = el("div", { class: "ss-kpis ss-section" });
    this.absent = el("p", { class: "ss-muted ss-note", "data-testid": "absent", hidden: "" });
    this.node = el("div", {}, this.row, this.absent);
  }

  update({ layout, live, ended }) {
    render(this.row, ...layout.kpis.map((spec) => tile(spec, live, ended)));
    showText(this.absent, layout.absent);
  }
}
