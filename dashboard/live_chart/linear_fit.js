// The chart of the linear workload: its points, the true line, and the fitted line.

import { Card } from "./card.js";
import { setText } from "./dom.js";
import { MISSING, isNumber, short } from "./format.js";
import { latest } from "./series.js";
import { withAlpha } from "./theme.js";

export class FitCard extends Card {
  constructor(spec, scene) {
    const { fit } = scene.store.layout;
    const shared = { series: fit.series, metric: fit.weight, style: "line" };
    const fitted = { ...shared, label: "fitted", color: "orange", dash: "solid" };
    const truth = { ...shared, label: "true line", color: "gray", dash: "dash" };
    super({ ...spec, y: { unit: "" }, traces: [fitted, truth] }, scene);
    // The arrow keys read no values of this chart.
    for (const name of ["tabindex", "role", "aria-roledescription", "aria-label"])
      this.stage.removeAttribute(name);
  }

  // [slope, intercept] of the fitted and of the true line; null before the first step.
  get slopes() {
    const { live, layout } = this.store;
    const { weight, bias, slope, intercept } = layout.fit;
    return [
      [latest(live.steps, weight), latest(live.steps, bias)],
      [slope, intercept],
    ];
  }

  figure() {
    const { palette } = this.scene.theme;
    const { x, y } = this.store.layout.fit;
    const ends = [Math.min(...x), Math.max(...x)];
    const shared = { type: "scatter", hoverinfo: "skip" };
    const lines = this.spec.traces.map((trace, i) => {
      const [slope, intercept] = this.slopes[i];
      const drawn = [slope, intercept].every(isNumber) && !this.hidden(trace);
      return {
        ...{ ...shared, mode: "lines", name: trace.label, x: drawn ? ends : [] },
        y: ends.map((at) => slope * at + intercept),
        line: { color: palette[trace.color], width: 2, dash: trace.dash },
      };
    });
    const marker = { size: 4, color: withAlpha(palette.blue, 0.5) };
    const data = [{ ...shared, mode: "markers", name: "data", x, y, marker }, ...lines.reverse()];
    const axis = { nticks: 6 };
    return { data, layout: { ...this.frame(false), xaxis: axis, yaxis: axis } };
  }

  // The x axis is the workload's input: marks and crosshair of the other charts do not apply.
  overlay() {
    this.slopes.forEach(([slope, intercept], i) => {
      const sign = intercept < 0 ? "−" : "+";
      const known = isNumber(slope) && isNumber(intercept);
      const text = known ? `${short(slope)} x ${sign} ${short(Math.abs(intercept))}` : MISSING;
      setText(this.chips[i].value, text);
    });
  }

  showHeld() {}

  hoverAt() {}

  point() {}

  press() {}
}
