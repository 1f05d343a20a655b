// The number tiles.

import { el, setAttribute, setText, svg } from "./dom.js";
import { MISSING, bytesOf, clock, isNumber, percent, precise, short, withUnit } from "./format.js";
import { linePoints } from "./lines.js";
import { oddNow, oddText } from "./odd.js";
import { latest, latestEver, secondsLeft } from "./series.js";

const SPARK_POINTS = 60;

class Tile {
  constructor(spec) {
    this.spec = spec;
    this.number = el("span", { class: "ss-num" }, "–");
    this.detail = el("span", { class: "ss-detail" });
    this.line = svg("path", { "vector-effect": "non-scaling-stroke" });
    const spark = svg(
      "svg",
      {
        class: "ss-spark",
        viewBox: "0 0 100 20",
        preserveAspectRatio: "none",
        "aria-hidden": "true",
      },
      this.line,
    );
    spark.style.color = `var(--ss-${spec.color || "gray"})`;
    // A total or a second number needs a line of its own, a unit does not.
    const layout = spec.of || spec.also || spec.special ? "ss-kpi-value ss-lines" : "ss-kpi-value";
    this.node = el(
      "div",
      { class: "ss-kpi", "data-testid": `kpi-${spec.id}`, title: spec.title || "" },
      el("div", { class: "ss-kpi-label" }, spec.label),
      el("div", { class: layout }, this.number, this.detail),
      ...(spec.special ? [] : [spark]),
    );
  }

  show([number, detail], reason) {
    setText(this.number, number);
    setText(this.detail, detail);
    setAttribute(this.node, "title", reason || this.spec.title || "");
    this.node.classList.toggle("ss-missing", number === MISSING);
  }

  update(live, progress, left) {
    const { text, reason, odd, drawn } = tileContent(this.spec, live, progress, left);
    this.node.classList.toggle("ss-odd", odd);
    if (drawn) this.spark(live[this.spec.series]);
    this.show(text, reason);
  }

  // The newest values over their places; like a chart's line it spans what a slow sensor leaves out.
  spark(series) {
    const { mean = [], odd = [] } = series.v[this.spec.metric] || {};
    const values = mean.slice(-SPARK_POINTS);
    const times = this.spec.series === "steps" ? null : series.t.slice(-SPARK_POINTS);
    const breaks = odd.slice(-SPARK_POINTS);
    const { x, y } = linePoints(
      values.map((_, i) => i),
      values,
      null,
      1,
      times,
      breaks,
    );
    const known = y.filter((value) => value !== null);
    const [low, high] = [Math.min(...known), Math.max(...known)];
    const height = (value) => (high > low ? 18 - (16 * (value - low)) / (high - low) : 18);
    const place = (i) => ((100 * i) / Math.max(1, values.length - 1)).toFixed(1);
    const pen = (i) => (i === 0 || y[i - 1] === null ? "M" : "L");
    const parts = y.map((value, i) =>
      value === null ? "" : `${pen(i)}${place(x[i])} ${height(value).toFixed(1)}`,
    );
    setAttribute(this.line, "d", parts.join(""));
  }
}

// What a tile shows: its two lines, why a value is missing, whether it is no finite number, and
// whether there is a line to draw.
export function tileContent(spec, live, progress, left) {
  const shown = { reason: null, odd: false, drawn: false };
  if (spec.special) {
    const [text, reason = null] = specialTile(spec, progress, left);
    return { ...shown, text, reason };
  }
  const series = live[spec.series];
  if (oddNow(series, spec.metric) !== null)
    return { ...shown, text: oddText(series, spec.metric), odd: true, drawn: true };
  const value = latest(series, spec.metric, spec.metric.includes("peak") ? "max" : "mean");
  if (value === null)
    return { ...shown, text: [MISSING, ""], reason: spec.reason || "No value recorded lately." };
  return { ...shown, text: tileText(spec, value, live), drawn: true };
}

function specialTile({ special: kind, reason }, progress, left) {
  if (kind === "eta") {
    return left === null
      ? [[MISSING, ""], "Not known yet: it needs a few steps and a total number of steps."]
      : [[clock(left), ""]];
  }
  const total = progress?.[kind === "step" ? "total_steps" : "epochs"];
  const value = progress?.[kind];
  if (!isNumber(value)) return [[MISSING, ""], reason || "No step recorded yet."];
  const of = isNumber(total) ? `of ${total.toLocaleString("en-US")}` : "";
  return [[value.toLocaleString("en-US"), of]];
}

function tileText(spec, value, live) {
  if (spec.unit === "B") {
    const total = spec.of && (latest(live[spec.of.series], spec.of.metric) ?? spec.of.value);
    return bytesOf(value, total);
  }
  if (spec.also) {
    const [loss, accuracy] = spec.also.map((key) => latestEver(live.steps, key));
    const text = isNumber(loss) ? loss.toPrecision(3) : loss;
    const parts = [loss === null ? "" : `val ${text}`, isNumber(accuracy) ? percent(accuracy) : ""];
    return [precise(value), parts.filter(Boolean).join(" · ")];
  }
  if (spec.unit === "1/s") return [short(value), ""];
  const text = withUnit(value, spec.unit);
  const at = text.indexOf(" ");
  return at < 0 ? [text, ""] : [text.slice(0, at), text.slice(at + 1)];
}

export class TileRow {
  constructor() {
    this.node = el("div", { class: "ss-kpis" });
    this.tiles = [];
  }

  configure(specs) {
    this.tiles = specs.map((spec) => new Tile(spec));
    this.node.replaceChildren(...this.tiles.map((tile) => tile.node));
  }

  update({ answer, live, ended }) {
    const left = ended ? null : secondsLeft(live.steps, answer.progress);
    for (const tile of this.tiles) tile.update(live, answer.progress, left);
  }
}
