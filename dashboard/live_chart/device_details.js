// The open GPU: what is said about its health, the last ten minutes, its facts, and who is on it.

import { levelIcon } from "./device_card.js";
import { el, setAttribute, setText } from "./dom.js";
import { KEPT_S, MiniChart } from "./mini_chart.js";

const PROCESS_HEADS = ["PID", "User", "Note", "Memory", "SM", "Command"];

export class DeviceDetails {
  constructor(close) {
    this.title = el("h3", {});
    this.close = el("button", { type: "button", class: "ss-button", onclick: close }, "Close");
    this.signs = el("ul", { class: "dv-signs" });
    this.difference = el("p", { class: "ss-muted dv-note" });
    this.charts = el("div", { class: "dv-charts" });
    this.groups = el("div", { class: "dv-groups" });
    this.run = el("a", { class: "ss-link", target: "_self" }, "Open run");
    this.processes = new ProcessTable("Processes");
    this.instances = el("div", { class: "dv-mig" });
    this.node = el(
      "section",
      { class: "dv-details", "data-testid": "gpu-details" },
      el("div", { class: "dv-details-head" }, this.title, this.run, this.close),
      this.signs,
      this.charts,
      this.difference,
      this.groups,
      this.processes.node,
      this.instances,
    );
    this.clear();
  }

  clear() {
    this.history = { t: [], v: {} };
    for (const part of ["chartText", "groupText", "signText", "migText"]) this[part] = null;
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
    this.updateCharts(gpu.charts, now);
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

  updateCharts(charts, now) {
    const text = charts.map(({ title, lines }) => title + lines.map(({ key }) => key)).join();
    if (text !== this.chartText) {
      this.chartText = text;
      this.drawn = charts.map(() => new MiniChart());
      this.charts.replaceChildren(...this.drawn.map(({ node }) => node));
    }
    charts.forEach((chart, at) => this.drawn[at].draw(chart, this.history, now));
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
    this.title = el("h4", {}, title);
    this.none = el("p", { class: "ss-muted" });
    this.body = el("tbody", {});
    const heads = PROCESS_HEADS.map((head) => el("th", { scope: "col" }, head));
    this.table = el("table", {}, el("thead", {}, el("tr", {}, ...heads)), this.body);
    this.box = el("div", { class: "ss-scroll dv-scroll", tabindex: 0, role: "group" }, this.table);
    this.setTitle(title);
    this.node = el("section", { class: "dv-processes" }, this.title, this.none, this.box);
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
