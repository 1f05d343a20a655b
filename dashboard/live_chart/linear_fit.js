// The linear workload's chart: its points, the line they were made from, the line learnt so far.

import { Card } from "./card.js";
import { setText } from "./dom.js";
import { MISSING, short } from "./format.js";
import { latest } from "./series.js";
import { withAlpha } from "./theme.js";

export class FitCard extends Card {
  constructor(spec, scene) {
    const { fit } = scene.store.layout;
    const shared = { color: "orange", series: fit.series, metric: fit.weight, style: "line" };
    const fitted = { ...shared, label: "fitted", dash: "solid" };
    const truth = { ...shared, label: "true line", color: "gray", dash: "dash" };
    super({ ...spec, y: { unit: "" }, traces: [fitted, truth] }, scene);
    this.ends = [Math.min(...fit.x), Math.max(...fit.x)];
  }

  figure() {
    const { scene, ends, spec } = this;
    const { palette, grid } = scene.theme;
    const { fit } = scene.store.layout;
    const [weight, bias] = this.learnt();
    const shared = { type: "scatter", hoverinfo: "skip" };
    const line = (trace, slope, intercept) => ({
      ...{ ...shared, mode: "lines", name: trace.label, x: ends },
      y: ends.map((x) => slope * x + intercept),
      line: { color: palette[trace.color], width: 2, dash: trace.dash },
    });
    const marker = { size: 4, color: withAlpha(palette.blue, 0.5) };
    const data = [{ ...shared, mode: "markers", name: "data", x: fit.x, y: fit.y, marker }];
    const [fitted, truth] = spec.traces;
    if (!this.hidden(truth)) data.push(line(truth, fit.slope, fit.intercept));
    const known = weight !== null && bias !== null;
    if (known && !this.hidden(fitted)) data.push(line(fitted, weight, bias));
    const axis = { fixedrange: true, gridcolor: grid, zeroline: false, nticks: 6 };
    axis.tickfont = { size: 11 };
    const layout = { ...this.frame(false), xaxis: axis, yaxis: axis };
    return { data, layout };
  }

  learnt() {
    const { live, layout } = this.scene.store;
    const { fit } = layout;
    return [latest(live.steps, fit.weight), latest(live.steps, fit.bias)];
  }

  // Its x axis is the workload's input, so marks and crosshair of the others mean nothing here.
  overlay() {
    const [weight, bias] = this.learnt();
    const { fit } = this.scene.store.layout;
    const text = (slope, intercept) => {
      if (slope === null || intercept === null) return MISSING;
      return `${short(slope)} x ${intercept < 0 ? "−" : "+"} ${short(Math.abs(intercept))}`;
    };
    setText(this.chips[0].value, text(weight, bias));
    setText(this.chips[1].value, text(fit.slope, fit.intercept));
  }

  showHeld() {}

  hoverAt() {}

  point() {}
}
