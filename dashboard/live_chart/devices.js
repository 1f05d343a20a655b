// The Hardware page: the machine, a card per GPU, and below the open card its details.

import { button, el, loadPlotly, morph, mounting, parts, render } from "./dom.js";
import { setAttribute, setChildren, setText, showText } from "./dom.js";
import { isNumber, scaleFor, suffix, withUnit } from "./format.js";
import { stretches } from "./series.js";
import { Poller } from "./poll.js";
import { readTheme } from "./theme.js";

const PACE_MS = 1_000;
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
function levelIcon(level) {
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

// Returns {data, layout} for Plotly of a chart over the history, with gaps where nothing was read.
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
  const layout = {
    ...{ template: theme.template, height: CHART_HEIGHT_PX, margin: { l: 44, r: 8, t: 26, b: 20 } },
    ...{ hovermode: "x unified", showlegend: true },
    hoverlabel: { bgcolor: theme.background },
    legend: { orientation: "h", x: 0, y: 1.02, yanchor: "bottom", itemclick: false },
    xaxis: { type: "date", range: span, showgrid: false, nticks: 6 },
    yaxis: { range: [0, top / factor], nticks: 4, ticksuffix: suffix(unit) },
  };
  return { data, layout };
}

// Appends new readings to a history {t, v: {key: values}}, and drops readings of before MAX_HISTORY_S.
export function extend(history, { t, v }, now) {
  const last = history.t.at(-1) ?? 0;
  const fresh = t.filter((time) => time <= last).length;
  history.t.push(...t.slice(fresh));
  for (const [key, values] of Object.entries(v))
    (history.v[key] ??= []).push(...values.slice(fresh));
  const kept = history.t.findIndex((time) => time >= now - MAX_HISTORY_S);
  if (kept > 0)
    for (const values of [history.t, ...Object.values(history.v)]) values.splice(0, kept);
}

function fact([label, value, help, missing]) {
  const shown = el("dd", { class: missing ? "ss-muted" : null }, value);
  return el("div", {}, el("dt", { title: help }, label), shown);
}

const factGroup = ({ title, rows }) =>
  el("section", {}, el("h4", {}, title), el("dl", {}, ...rows.map(fact)));

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
  const shown = rows.length ? el("div", box, table) : el("p", { class: "ss-muted" }, none);
  return el("section", { class: "dv-processes ss-section" }, el("h4", {}, title), shown);
}

class DeviceDetails {
  // The owner sets `theme` and `plotly`, the address of plotly.js.
  constructor(close) {
    const details = parts(`<section class="ss-box dv-details" data-testid="gpu-details">
      <div class="ss-row" ref="head"><h3 ref="title"></h3></div>
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
    const whole = processTable("Processes", gpu.processes, gpu.no_processes);
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

// A share of 0 to 100 as a bar between its name and its text; without a share the text alone.
function meter(label, color, { share, text }) {
  const known = isNumber(share);
  const width = Math.max(0, Math.min(100, share ?? 0));
  const fill = el("i", { style: `width:${width}%;background:var(--ss-${color})` });
  return el(
    "div",
    { class: "dv-meter", title: known ? null : text },
    el("span", { class: "ss-cut" }, label),
    el("span", { class: "dv-bar", "aria-hidden": "true", hidden: known ? null : "" }, fill),
    el("span", { class: "ss-cut" }, text),
  );
}

function deviceCard(gpu, open, press) {
  const { uuid, level, title, cuda, name, short, health, who, line, instances } = gpu;
  const text = (kind, words, help = words) => el("span", { class: kind, title: help }, words ?? "");
  const state = { "data-level": level, "data-open": open ? 1 : null };
  return el(
    "article",
    { class: "ss-box dv-card", "data-testid": `gpu-${uuid}`, ...state },
    el(
      "div",
      { class: "dv-head" },
      el("h3", {}, button(press, { class: "dv-open", "aria-expanded": String(open) }, title)),
      text("ss-muted dv-cuda", cuda),
      text("ss-cut", name),
      text("ss-muted", short, uuid),
    ),
    el("p", { class: "dv-health" }, levelIcon(level), text(null, health)),
    meter("Utilization", "green", gpu.utilization),
    meter("Memory", "green", gpu.memory),
    el("p", { class: "ss-cut" }, line.join(" · ")),
    el("p", { class: "ss-cut ss-muted", title: who }, who ?? ""),
    ...instances.map(({ profile, memory }) => meter(profile, "green", memory)),
  );
}

class DevicesView {
  constructor(parent) {
    this.open = null; // UUID of the open GPU
    this.gpus = [];
    this.cards = new Map(); // UUID -> node
    this.polls = 0;
    const view = parts(`<div class="ss-root dv-root" data-testid="devices" data-polls="0">
      <p class="ss-warning" role="status" hidden ref="trouble"></p>
      <section class="ss-box ss-row dv-host" data-testid="host" aria-label="This machine" hidden ref="host">
        <div class="dv-load" ref="load"></div><dl class="ss-row dv-facts" ref="facts"></dl>
      </section>
      <section class="ss-box ss-note ss-section" data-testid="no-gpu" hidden ref="none">
        <h3>No GPU found</h3><p ref="reason"></p><p class="ss-muted" ref="next"></p>
      </section>
      <div class="dv-grid" data-testid="gpus" ref="grid"></div>
    </div>`);
    Object.assign(this, view, { root: view.node });
    this.details = new DeviceDetails(() => this.show(null));
    this.root.addEventListener("keydown", (event) => {
      if (event.key === "Escape" && this.open) this.show(null);
    });
    parent.append(this.root);
    this.poller = new Poller({
      url: () => this.address(),
      pace: () => PACE_MS,
      take: (answer) => this.take(answer),
      refused: () => this.open && this.show(null), // the open GPU was removed
      trouble: (sentence) => showText(this.trouble, sentence),
    });
  }

  configure({ first, plotly }) {
    Object.assign(this.details, { theme: readTheme(this.root), plotly });
    if (first && !this.answer) this.take(first);
    this.poller.now();
  }

  address() {
    if (!this.open) return "/api/devices";
    return `/api/devices?${new URLSearchParams({ gpu: this.open, since: this.details.last })}`;
  }

  take(answer) {
    this.answer = answer;
    showText(this.trouble, answer.trouble);
    const { machine, gpu } = answer;
    if (machine) this.showMachine(machine);
    if (gpu && gpu.uuid === this.open) this.showDetails(gpu, answer.now);
    this.polls += 1;
    setAttribute(this.root, "data-polls", this.polls);
  }

  showDetails(gpu, now) {
    const first = !this.details.last;
    this.details.update(gpu, now);
    if (first) this.details.node.scrollIntoView({ block: "nearest" });
  }

  showMachine({ host, none, cards }) {
    this.host.hidden = false;
    render(
      this.load,
      el("h3", { class: "ss-cut" }, host.name),
      meter("CPU", "blue", host.cpu),
      meter("Memory", "green", host.memory),
    );
    render(this.facts, ...host.facts.map(fact));
    this.none.hidden = !none;
    setText(this.reason, none?.reason ?? "");
    setText(this.next, none?.next ?? "");
    this.gpus = cards;
    this.showCards();
  }

  showCards() {
    const { gpus, cards: before } = this;
    this.cards = new Map(gpus.map(({ uuid }) => [uuid, before.get(uuid) ?? el("article")]));
    if (!this.cards.has(this.open)) this.open = null;
    const nodes = gpus.flatMap((gpu) => {
      const [node, open] = [this.cards.get(gpu.uuid), gpu.uuid === this.open];
      const press = () => this.show(open ? null : gpu.uuid);
      morph(node, deviceCard(gpu, open, press));
      return open ? [node, this.details.node] : [node];
    });
    setChildren(this.grid, nodes);
  }

  // Opens the details of a GPU; null closes them and returns the focus to the card.
  show(uuid) {
    const before = this.cards.get(this.open);
    this.open = uuid;
    this.details.clear();
    this.showCards();
    if (!uuid) before?.querySelector("button").focus();
    this.poller.restart();
  }

  close() {
    this.poller.close();
    this.details.clear();
    this.root.remove();
  }
}

export const stepscopeDevices = mounting("stepscopeDevices", DevicesView);
