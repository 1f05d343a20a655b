// The open GPU: what is said about its health, the last ten minutes, its facts, and who is on it.

import { el, loadPlotly, parts, setAttribute, setText } from "./dom.js";
import { isNumber, scaleFor, withUnit } from "./format.js";
import { stretches } from "./lines.js";

const PROCESS_HEADS = ["PID", "User", "Note", "Memory", "SM", "Command"];
const KEPT_S = 600;
const SHORTEST_S = 60; // so that the first seconds do not fill the width
const CHART_HEIGHT = 150; // px
const LEVELS = {
  ok: ["✓", "OK"],
  notice: ["i", "Notice"],
  warning: ["▲", "Warning"],
  critical: ["✕", "Critical"],
};

// The sign of a level of health, told apart by its shape and its word as well as by its color.
export function levelIcon(level) {
  const [icon, word] = LEVELS[level];
  return el("span", { class: `dv-level dv-${level}`, role: "img", "aria-label": word }, icon);
}

// The upper edge: what the GPU can do where it is known, else a little above what was seen.
export function topOf(chart, values) {
  if (isNumber(chart.top) && chart.top > 0) return chart.top;
  const highest = Math.max(0, chart.mark?.value ?? 0, ...values.flat().filter(isNumber));
  const least = chart.unit === "B/s" ? 2 ** 20 : 0; // a still link is no wave
  return 1.08 * Math.max(highest, least) || 1;
}

// Epoch seconds as Plotly's dates, which have no time zone, in the time zone of the browser.
const dateOf = (time) => 1000 * time - 60_000 * new Date().getTimezoneOffset();

// The lines of a chart over the last ten minutes as {data, layout} of Plotly. A line has a gap where
// nothing was read for some seconds.
export function chartFigure(chart, { t, v }, now, theme) {
  const values = chart.lines.map(({ key }) => t.map((_, at) => v[key]?.[at] ?? null));
  const top = topOf(chart, values);
  const { unit, factor } = scaleFor(chart.unit, top);
  const span = [Math.min(t[0] ?? now, now - SHORTEST_S), now].map(dateOf);
  const data = chart.lines.map(({ label, color }, line) => {
    const [x, y] = [[], []]; // not thinned: the pointer reads every value
    for (const stretch of stretches(t, values[line], null, t)) {
      x.push(...stretch.map((at) => dateOf(t[at])), null);
      y.push(...stretch.map((at) => values[line][at] / factor), null);
    }
    return {
      ...{ type: "scatter", mode: "lines", x, y },
      name: `${label} ${withUnit(values[line].at(-1), chart.unit)}`,
      hovertemplate: `${label} %{y:.3~g} ${unit}<extra></extra>`,
      line: { color: theme.palette[color], width: 1.6 },
    };
  });
  if (chart.mark) {
    const { label, value } = chart.mark;
    data.push({
      ...{ type: "scatter", mode: "lines", x: span, y: [value / factor, value / factor] },
      ...{ name: `${label} ${withUnit(value, chart.unit)}`, hoverinfo: "skip" },
      line: { color: theme.palette.gray, width: 1.2, dash: "dash" },
    });
  }
  const axis = { fixedrange: true, zeroline: false, gridcolor: theme.grid, tickfont: { size: 11 } };
  const layout = {
    ...{ height: CHART_HEIGHT, margin: { l: 44, r: 8, t: 26, b: 20 }, hovermode: "x unified" },
    ...{ paper_bgcolor: "rgba(0,0,0,0)", plot_bgcolor: "rgba(0,0,0,0)", showlegend: true },
    font: { family: theme.font, color: theme.text, size: 11.5 },
    hoverlabel: { bgcolor: theme.background },
    legend: { orientation: "h", x: 0, y: 1.02, yanchor: "bottom", itemclick: false },
    xaxis: { ...axis, type: "date", range: span, showgrid: false, nticks: 6 },
    yaxis: { ...axis, range: [0, top / factor], nticks: 4, ticksuffix: ` ${unit}` },
  };
  return { data, layout };
}

export class DeviceDetails {
  constructor(close) {
    const details = parts(`<section class="dv-box dv-details" data-testid="gpu-details">
      <div class="ss-row">
        <h3 ref="title"></h3><a class="ss-link" target="_self" ref="run">Open run</a>
        <button type="button" class="ss-button dv-close" ref="closer">Close</button>
      </div>
      <ul class="dv-signs" ref="signs"></ul>
      <div class="dv-charts" ref="charts"></div>
      <p class="ss-muted dv-note" ref="difference"></p>
      <div class="dv-groups" ref="groups"></div>
      <div ref="processTables"></div>
    </section>`);
    Object.assign(this, details);
    this.closer.addEventListener("click", close);
    this.processes = new ProcessTable("Processes");
    this.instances = el("div", {});
    this.processTables.append(this.processes.node, this.instances);
    this.drawn = [];
    this.clear();
  }

  use(theme, plotly) {
    Object.assign(this, { theme, plotly });
  }

  clear() {
    this.history = { t: [], v: {} };
    for (const part of ["chartText", "groupText", "signText", "migText"]) this[part] = null;
    for (const { plot } of this.drawn) this.Plotly?.purge(plot);
    this.drawn = [];
    this.gpu = null;
    for (const node of [this.charts, this.groups, this.signs, this.instances])
      node.replaceChildren();
    setText(this.title, "Reading…");
    setText(this.difference, "");
    this.run.hidden = true;
    this.processes.update([], "");
  }

  // The time of the newest reading that is held here, in epoch seconds.
  get last() {
    return this.history.t.at(-1) ?? 0;
  }

  update(gpu, now) {
    setText(this.title, `${gpu.title} · ${gpu.name}`);
    setAttribute(this.node, "aria-label", `Details of ${gpu.title}`);
    this.run.hidden = !gpu.run;
    if (gpu.run) setAttribute(this.run, "href", `./?${new URLSearchParams({ run: gpu.run })}`);
    this.updateSigns(gpu.signs);
    extend(this.history, gpu.history, now);
    this.gpu = gpu;
    loadPlotly(this.plotly).then(
      (Plotly) => this.gpu === gpu && this.updateCharts(Plotly, gpu.charts, now),
      (error) => setText(this.charts, error.message),
    );
    setText(this.difference, gpu.difference);
    this.updateGroups(gpu.groups);
    this.processes.update(gpu.processes ?? [], gpu.no_processes);
    this.updateInstances(gpu.instances);
  }

  updateSigns(signs) {
    const text = JSON.stringify(signs);
    if (text === this.signText) return;
    this.signText = text;
    this.signs.replaceChildren(
      ...signs.map(({ level, text: words }) => el("li", {}, levelIcon(level), words)),
    );
  }

  updateCharts(Plotly, charts, now) {
    this.Plotly = Plotly;
    const text = charts.map(({ title, lines }) => title + lines.map(({ key }) => key)).join();
    if (text !== this.chartText) {
      this.chartText = text;
      const made = `<figure class="dv-chart" role="img"><h4 ref="title"></h4>
        <div ref="plot"></div></figure>`;
      this.drawn = charts.map(() => parts(made));
      this.charts.replaceChildren(...this.drawn.map(({ node }) => node));
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

  updateGroups(groups) {
    const text = groups.map(({ title, rows }) => title + rows.map(([label]) => label)).join();
    if (text !== this.groupText) {
      this.groupText = text;
      this.values = [];
      this.groups.replaceChildren(...groups.map((group) => this.group(group)));
    }
    groups
      .flatMap(({ rows }) => rows)
      .forEach(([, words, , missing], at) => {
        setText(this.values[at], words);
        setAttribute(this.values[at], "class", missing ? "dv-missing" : null);
      });
  }

  group({ title, rows }) {
    const list = el("dl", {});
    for (const [label, , help] of rows) {
      const value = el("dd", {});
      this.values.push(value);
      list.append(el("div", {}, el("dt", { title: help }, label), value));
    }
    return el("section", {}, el("h4", {}, title), list);
  }

  updateInstances(instances) {
    const text = instances.map(({ uuid, profile }) => uuid + profile).join();
    if (text !== this.migText) {
      this.migText = text;
      this.tables = instances.map(() => new ProcessTable(""));
      this.instances.replaceChildren(...this.tables.map(({ node }) => node));
    }
    instances.forEach((instance, at) => {
      const { profile, short, memory, processes, no_processes: none } = instance;
      this.tables[at].setTitle(`MIG ${profile} · ${short} · memory ${memory}`);
      this.tables[at].update(processes, none);
    });
  }
}

// Adds the new readings, and forgets those that are too old.
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
  const kept = history.t.findIndex((time) => time >= now - KEPT_S);
  if (kept <= 0) return;
  history.t.splice(0, kept);
  for (const values of Object.values(history.v)) values.splice(0, kept);
}

// Who is on a GPU; its rows stay, their words change.
class ProcessTable {
  constructor(title) {
    const heads = PROCESS_HEADS.map((head) => `<th scope="col">${head}</th>`).join("");
    const table = parts(`<section class="dv-processes">
      <h4 ref="title"></h4><p class="ss-muted" ref="none"></p>
      <div class="ss-scroll dv-scroll" tabindex="0" role="group" ref="box">
        <table><thead><tr>${heads}</tr></thead><tbody ref="body"></tbody></table>
      </div>
    </section>`);
    Object.assign(this, table);
    this.setTitle(title);
  }

  setTitle(title) {
    setText(this.title, title);
    setAttribute(this.box, "aria-label", title);
  }

  update(processes, none) {
    setText(this.none, none);
    this.none.hidden = !none;
    this.box.hidden = !processes.length;
    while (this.body.rows.length > processes.length) this.body.lastElementChild.remove();
    while (this.body.rows.length < processes.length)
      this.body.append(el("tr", {}, ...PROCESS_HEADS.map(() => el("td", {}))));
    processes.forEach((process, at) => this.fill(this.body.rows[at], process));
  }

  fill(row, { pid, user, whose, memory, sm, state, kind, command }) {
    setAttribute(row, "data-yours", whose ? 1 : null);
    const about = [whose, kind === "graphics" ? "graphics" : "", state].filter(Boolean);
    const words = [String(pid), user, about.join(", "), memory, sm, command];
    words.forEach((text, at) => setText(row.cells[at], text));
  }
}
