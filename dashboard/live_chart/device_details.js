// The open GPU: its health, charts of the last ten minutes, facts, and processes.

import { button, el, loadPlotly, parts, render, setAttribute, setText, showText } from "./dom.js";
import { isNumber, scaleFor, suffix, withUnit } from "./format.js";
import { stretches } from "./lines.js";

const PROCESS_HEADS = ["PID", "User", "Note", "Memory", "SM", "Command"];
const MAX_HISTORY_S = 600;
const MIN_SPAN_S = 60; // the first seconds do not fill the width
const CHART_HEIGHT_PX = 150;
const MIN_TOP = { "B/s": 2 ** 20 }; // a line of bytes per second stays low on an idle link
const LEVELS = {
  ok: ["✓", "OK"],
  notice: ["i", "Notice"],
  warning: ["▲", "Warning"],
  critical: ["✕", "Critical"],
};

// The icon of a health level; its shape and label differ as well as its color.
export function levelIcon(level) {
  const [icon, label] = LEVELS[level];
  return el("span", { class: `dv-level dv-${level}`, role: "img", "aria-label": label }, icon);
}

// The upper edge of a chart: the GPU's limit if known, else a little above the values.
export function topOf(chart, values) {
  if (isNumber(chart.top) && chart.top > 0) return chart.top;
  const highest = Math.max(0, chart.mark?.value ?? 0, ...values.flat().filter(isNumber));
  return 1.08 * Math.max(highest, MIN_TOP[chart.unit] ?? 0) || 1;
}

// Converts epoch seconds to Plotly's dates, which have no time zone, in the browser's time zone.
const dateOf = (time) => 1000 * time - 60_000 * new Date().getTimezoneOffset();

// Returns {data, layout} for Plotly of a chart over the history. A line has a gap where no value was
// read for some seconds.
export function chartFigure(chart, { t, v }, now, theme) {
  const values = chart.lines.map(({ key }) => t.map((_, at) => v[key]?.[at] ?? null));
  const top = topOf(chart, values);
  const { unit, factor } = scaleFor(chart.unit, top);
  const span = [Math.min(t[0] ?? now, now - MIN_SPAN_S), now].map(dateOf);
  const shared = { type: "scatter", mode: "lines" };
  const data = chart.lines.map(({ label, color }, line) => {
    const [x, y] = [[], []]; // all values: the pointer reads every one
    for (const stretch of stretches(t, values[line], null, t)) {
      x.push(...stretch.map((at) => dateOf(t[at])), null);
      y.push(...stretch.map((at) => values[line][at] / factor), null);
    }
    return {
      ...{ ...shared, x, y, name: `${label} ${withUnit(values[line].at(-1), chart.unit)}` },
      hovertemplate: `${label} %{y:.3~g}${suffix(unit)}<extra></extra>`,
      line: { color: theme.palette[color], width: 1.6 },
    };
  });
  if (chart.mark) {
    const { label, value } = chart.mark;
    data.push({
      ...{ ...shared, x: span, y: [value / factor, value / factor], hoverinfo: "skip" },
      name: `${label} ${withUnit(value, chart.unit)}`,
      line: { color: theme.palette.gray, width: 1.2, dash: "dash" },
    });
  }
  const axis = { fixedrange: true, zeroline: false, gridcolor: theme.grid, tickfont: { size: 11 } };
  const layout = {
    ...{ height: CHART_HEIGHT_PX, margin: { l: 44, r: 8, t: 26, b: 20 }, hovermode: "x unified" },
    ...{ paper_bgcolor: "rgba(0,0,0,0)", plot_bgcolor: "rgba(0,0,0,0)", showlegend: true },
    font: { family: theme.font, color: theme.text, size: 11.5 },
    hoverlabel: { bgcolor: theme.background },
    legend: { orientation: "h", x: 0, y: 1.02, yanchor: "bottom", itemclick: false },
    xaxis: { ...axis, type: "date", range: span, showgrid: false, nticks: 6 },
    yaxis: { ...axis, range: [0, top / factor], nticks: 4, ticksuffix: suffix(unit) },
  };
  return { data, layout };
}

// Appends new readings to a history {t, v: {key: values}}, and drops readings of before MAX_HISTORY_S.
export function extend(history, { t, v }, now) {
  const last = history.t.at(-1) ?? 0;
  const fresh = t.findIndex((time) => time > last);
  if (fresh >= 0) {
    const before = history.t.length;
    history.t.push(...t.slice(fresh));
    for (const key of new Set([...Object.keys(history.v), ...Object.keys(v)])) {
      history.v[key] ??= new Array(before).fill(null);
      history.v[key].push(...(v[key] ?? new Array(t.length).fill(null)).slice(fresh));
    }
  }
  const kept = history.t.findIndex((time) => time >= now - MAX_HISTORY_S);
  if (kept > 0)
    for (const values of [history.t, ...Object.values(history.v)]) values.splice(0, kept);
}

function factGroup({ title, rows }) {
  const facts = rows.map(([label, value, help, missing]) =>
    el(
      "div",
      {},
      el("dt", { title: help }, label),
      el("dd", { class: missing ? "ss-muted" : null }, value),
    ),
  );
  return el("section", {}, el("h4", {}, title), el("dl", {}, ...facts));
}

// The processes of a GPU or of a MIG instance; `none` is the reason without any.
function processTable(title, processes, none) {
  const heads = PROCESS_HEADS.map((head) => el("th", { scope: "col" }, head));
  const rows = processes.map(({ pid, user, whose, memory, sm, state, kind, command }) => {
    const note = [whose, kind === "graphics" ? "graphics" : "", state].filter(Boolean);
    const cells = [pid, user, note.join(", "), memory, sm, command].map((text) =>
      el("td", {}, text),
    );
    return el("tr", { "data-yours": whose ? 1 : null }, ...cells);
  });
  const table = el("table", {}, el("thead", {}, el("tr", {}, ...heads)), el("tbody", {}, ...rows));
  const box = { class: "ss-scroll dv-scroll", tabindex: 0, role: "group", "aria-label": title };
  return el(
    "section",
    { class: "dv-processes ss-section" },
    el("h4", {}, title),
    rows.length ? el("div", box, table) : el("p", { class: "ss-muted" }, none ?? ""),
  );
}

export class DeviceDetails {
  // The owner sets `theme` and `plotly`, the address of plotly.js.
  constructor(close) {
    const details = parts(`<section class="ss-box dv-details" data-testid="gpu-details">
      <div class="ss-row" ref="head"><h3 ref="title"></h3>
        <a class="ss-link" target="_self" ref="run">Open run</a></div>
      <ul class="dv-signs" ref="signs"></ul>
      <div class="dv-charts" ref="charts"></div>
      <p class="ss-muted ss-note" ref="difference"></p>
      <div class="dv-groups" ref="groups"></div>
      <div ref="processes"></div>
    </section>`);
    Object.assign(this, details);
    this.head.append(button(close, { class: "ss-button ss-end" }, "Close"));
    this.drawn = [];
    this.clear();
  }

  clear() {
    this.history = { t: [], v: {} };
    this.gpu = null;
    this.clearCharts();
    for (const node of [this.signs, this.groups, this.processes]) render(node);
    setText(this.title, "Reading…");
    showText(this.difference, "");
    this.run.hidden = true;
  }

  clearCharts() {
    for (const { plot } of this.drawn) this.Plotly?.purge(plot);
    this.drawn = [];
    this.charts.replaceChildren();
  }

  // The time of the newest reading in epoch seconds, 0 without any.
  get last() {
    return this.history.t.at(-1) ?? 0;
  }

  update(gpu, now) {
    this.gpu = gpu;
    setText(this.title, `${gpu.title} · ${gpu.name}`);
    setAttribute(this.node, "aria-label", `Details of ${gpu.title}`);
    this.run.hidden = !gpu.run;
    if (gpu.run) setAttribute(this.run, "href", `./?${new URLSearchParams({ run: gpu.run })}`);
    const sign = ({ level, text }) => el("li", {}, levelIcon(level), text);
    render(this.signs, ...gpu.signs.map(sign));
    extend(this.history, gpu.history, now);
    loadPlotly(this.plotly).then(
      (Plotly) => this.gpu === gpu && this.updateCharts(Plotly, gpu.charts, now),
      (error) => setText(this.charts, error.message),
    );
    showText(this.difference, gpu.difference);
    render(this.groups, ...gpu.groups.map(factGroup));
    const instances = gpu.instances.map(
      ({ profile, short, memory, processes, no_processes: none }) =>
        processTable(`MIG ${profile} · ${short} · memory ${memory}`, processes, none),
    );
    const whole = processTable("Processes", gpu.processes ?? [], gpu.no_processes);
    render(this.processes, whole, ...instances);
  }

  updateCharts(Plotly, charts, now) {
    this.Plotly = Plotly;
    if (charts.length !== this.drawn.length) {
      this.clearCharts();
      const markup = `<figure class="dv-chart" role="img" tabindex="0"><h4 ref="title"></h4>
        <div ref="plot"></div></figure>`;
      this.drawn = charts.map(() => parts(markup));
      this.charts.append(...this.drawn.map(({ node }) => node));
    }
    charts.forEach((chart, at) => {
      const { node, title, plot } = this.drawn[at];
      const { data, layout } = chartFigure(chart, this.history, now, this.theme);
      setText(title, chart.title);
      const values = data.slice(0, chart.lines.length).map(({ name }) => name);
      setAttribute(node, "aria-label", `${chart.title}: ${values.join(", ")}`);
      Plotly.react(plot, data, layout, { displayModeBar: false, responsive: true });
    });
  }
}
