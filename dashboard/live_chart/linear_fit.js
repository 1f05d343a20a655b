// The linear workload's chart: its points, the line they were made from, the line learnt so far.

import { Card } from "./card.js";
import { setText } from "./dom.js";
import { MISSING, short } from "./format.js";
import { latest } from "./series.js";
import { withAlpha } from "./theme.js";

export class FitCard extends Card {
  constructor(spec, scene) {
    const { fit } = scene.store.layout;
    const entry = (label, color, dash) => ({
      label,
      color,
      dash,
      series: fit.series,
      metric: fit.weight,
      style: "line",
    });
    super(
      {
        ...spec,
        y: { unit: "" },
        traces: [entry("fitted", "orange", "solid"), entry("true line", "gray", "dash")],
      },
      scene,
    );
    this.ends = [Math.min(...fit.x), Math.max(...fit.x)];
  }

  figure() {
    const { scene, ends } = this;
    const { theme } = scene;
    const { fit } = scene.store.layout;
    const { palette } = theme;
    const [weight, bias] = this.learnt();
    const line = (slope, intercept, name, color, dash) => ({
      type: "scatter",
      mode: "lines",
      name,
      x: ends,
      y: ends.map((x) => slope * x + intercept),
      hoverinfo: "skip",
      line: { color: color, width: 2, dash },
    });
    const marker = { size: 4, color: withAlpha(palette.blue, 0.5) };
    const dots = {
      type: "scatter",
      mode: "markers",
      name: "data",
      x: fit.x,
      y: fit.y,
      hoverinfo: "skip",
      marker,
    };
    const data = [dots];
    if (!this.hidden(this.spec.traces[1]))
      data.push(line(fit.slope, fit.intercept, "true line", palette.gray, "dash"));
    const known = weight !== null && bias !== null;
    if (known && !this.hidden(this.spec.traces[0]))
      data.push(line(weight, bias, "fitted", palette.orange, "solid"));
    const axis = {
      fixedrange: true,
      gridcolor: theme.grid,
      zeroline: false,
      tickfont: { size: 11 },
      nticks: 6,
    };
    const layout = {
      width: this.width,
      height: this.height,
      margin: this.box,
      showlegend: false,
      hovermode: false,
      dragmode: false,
      paper_bgcolor: "rgba(0,0,0,0)",
      plot_bgcolor: "rgba(0,0,0,0)",
      font: { family: theme.font, color: theme.text },
      xaxis: axis,
      yaxis: axis,
    };
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
