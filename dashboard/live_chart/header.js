// The sticky header of a run: picker, status, progress, buttons, result of a command, warnings, tabs.

import { button, el, parts, render, setAttribute, setChildren, setText, showText } from "./dom.js";
import { activeAlerts } from "./events.js";
import { clock, counted, isNumber, withUnit } from "./format.js";
import { ask } from "./poll.js";
import { latest, secondsLeft } from "./series.js";

const MAX_TEXT_CHARACTERS = 200;

// Sends a command to the run. Throws an Error with a sentence for the user.
export function sendCommand(run, id, name, args) {
  return ask("/api/command", null, {
    method: "POST",
    headers: { "Content-Type": "application/json" },
    body: JSON.stringify({ run, id, name, args }),
  });
}

// Microseconds since 1970, like the server's own ids: they rise with time.
export const newCommandId = () => Math.round((performance.timeOrigin + performance.now()) * 1000);

// Returns {refused, title} of a button: the reason if it is disabled. Returns null if it is hidden.
export function buttonState({ help, when }, status) {
  if (!(status in when)) return null;
  const refused = when[status];
  return { refused, title: refused ? `${help} Not now: ${refused}` : help };
}

class Button {
  constructor(label, press) {
    const pressed = () => this.refused === null && press();
    this.node = this.part = button(pressed, { class: "ss-button" }, label);
    this.refused = null;
  }

  // Shows a state of `buttonState`. A disabled button can be focused and names its reason.
  show(state, waiting) {
    const { refused = null, title = null } = state ?? {};
    this.refused = refused;
    this.node.hidden = !state;
    setAttribute(this.node, "title", title);
    setAttribute(this.node, "aria-disabled", refused === null ? null : "true");
    setAttribute(this.node, "aria-busy", waiting ? "true" : null);
  }
}

const steps = (label, value, submit) => ({
  input: { type: "number", "aria-label": label, min: 1, max: 50, step: 1, value, required: "" },
  before: "Next steps",
  submit,
  args: (typed) => ({ steps: Number(typed) }),
});
const BOXES = {
  mark: {
    input: {
      type: "text",
      maxlength: MAX_TEXT_CHARACTERS,
      placeholder: "Describe the event",
      "aria-label": "Event text",
    },
    before: "",
    submit: "Add annotation",
    args: (typed) => ({ text: typed }),
  },
  profile: steps("Steps to profile", 5, "Start profile"),
  memory_snapshot: steps("Steps to record", 1, "Record allocations"),
};

// A button that opens a popover with an input; Enter sends the command.
class BoxButton extends Button {
  constructor(label, { input, before, submit, args }, send) {
    super(label, () => {});
    const field = el("input", { class: "ss-field", ...input, autofocus: "" });
    const onsubmit = (event) => {
      event.preventDefault();
      send(args(field.value));
      field.value = input.value ?? "";
      this.box.hidePopover();
    };
    const press = el("button", { class: "ss-button" }, submit);
    const form = el("form", { class: "ss-row", onsubmit }, before, field, press);
    const onbeforetoggle = () => this.place();
    this.box = el("div", { class: "ss-popover", popover: "auto", onbeforetoggle }, form);
    this.part = el("span", { class: "ss-contents" }, this.node, this.box);
  }

  place() {
    const { left, bottom } = this.node.getBoundingClientRect();
    this.box.style.left = `min(${left}px, 100vw - 290px)`;
    this.box.style.top = `${bottom + 4}px`;
  }

  show(state, waiting) {
    super.show(state, waiting);
    this.node.popoverTargetElement = this.refused === null ? this.box : null;
  }
}

// The buttons of the memory chart (`memory` is true), or all others.
export class ButtonGroup {
  constructor(memory, send, label) {
    Object.assign(this, { memory, send, made: [] });
    this.node = el("div", { class: "ss-buttons", role: "group", "aria-label": label });
  }

  configure(specs) {
    const before = new Map(this.made.map(({ spec, button }) => [spec.name, button]));
    this.made = specs
      .filter((spec) => spec.memory === this.memory)
      .map((spec) => ({ spec, button: before.get(spec.name) ?? this.make(spec) }));
    const nodes = this.made.map(({ button }) => button.part);
    setChildren(this.node, nodes);
  }

  make(spec) {
    const send = (args = {}) => this.send(spec, args);
    const box = BOXES[spec.name];
    return box ? new BoxButton(spec.label, box, send) : new Button(spec.label, send);
  }

  update(status, waitingFor) {
    for (const { spec, button } of this.made)
      button.show(buttonState(spec, status), waitingFor === spec.name);
  }
}

const STATUSES = {
  pending: ["○", "Pending", "gray"],
  running: ["●", "Running", "green"],
  paused: ["Ⅱ", "Paused", "amber"],
  finished: ["✓", "Finished", "blue"],
  stopped: ["■", "Stopped", "gray"],
  failed: ["✕", "Failed", "orange"],
  crashed: ["!", "Crashed", "orange"],
};

const joined = (parts) => parts.filter(Boolean).join(" · ");

// "step 2,244 of 30,600", without a total "step 2,244", "" without a value.
function place(word, value, total) {
  if (!isNumber(value)) return "";
  return `${word} ${counted(value)}${isNumber(total) ? ` of ${counted(total)}` : ""}`;
}

// Returns {share, text}: "step 2,244 of 30,600 · 7% · 3:03 left"; `share` is null if it is unknown.
export function progressOf({ answer, live, ended }) {
  const { step, total_steps: total } = answer.progress || {};
  const share = isNumber(step) && total > 0 ? Math.min(1, step / total) : null;
  const moves = !ended && answer.status !== "paused";
  const left = moves ? secondsLeft(live.steps, answer.progress) : null;
  const text = joined([
    place("step", step, total),
    share === null ? "" : `${Math.floor(100 * share)}%`,
    left === null ? "" : `${clock(left)} left`,
  ]);
  return { share, text };
}

export function detailsOf({ answer, live, ended }) {
  const { epoch, epochs } = answer.progress || {};
  const times = Object.values(live).map((series) => series.t.at(-1) ?? 0);
  const elapsed = ended || answer.source?.lost ? Math.max(...times, 0) : answer.now;
  const overhead = ended ? null : latest(live.samples, "sampler/cost");
  return joined([
    place("epoch", epoch, epochs),
    isNumber(elapsed) ? `elapsed ${clock(elapsed)}` : "",
    overhead === null ? "" : `Stepscope: ${withUnit(overhead, "s")} per reading`,
  ]);
}

export class Header {
  // `retry()`, `pick(run)`, `open(tab)` and `send(button, args)` are called for presses.
  constructor({ retry, pick, open, send }) {
    const header =
      parts(`<div class="ss-header" role="region" aria-label="Run" data-testid="header">
      <div class="ss-row">
        <div class="ss-contents" role="status" data-testid="status" ref="status"></div>
        <span class="ss-pill ss-badge" data-testid="source" hidden ref="source"></span>
        <select class="ss-field ss-picker" aria-label="Run" ref="picker"
          title="Shown run. Live runs first, then newest."></select>
        <span class="ss-nowrap" data-testid="progress" ref="progressText"></span>
        <div class="ss-buttons ss-end" ref="actions"></div>
      </div>
      <div class="ss-row ss-muted ss-second">
        <span class="ss-ack" role="status" data-testid="ack" ref="ack"></span>
        <span class="ss-end" ref="details"></span>
      </div>
      <p class="ss-muted" ref="readOnly"></p>
      <p class="ss-muted" role="status" data-testid="loading" ref="loading"></p>
      <p class="ss-warning" role="alert" data-testid="trouble" ref="trouble"></p>
      <div role="status" data-testid="warnings" ref="warnings"></div>
      <p class="ss-warning ss-cut" role="alert" data-testid="alerts" hidden ref="alerts"></p>
      <div class="ss-track" role="progressbar" aria-label="Training progress" aria-valuemin="0"
        aria-valuemax="100" ref="bar"><div class="ss-fill" ref="fill"></div></div>
      <nav class="ss-tabs" aria-label="Views of the run" ref="tabs"></nav>
    </div>`);
    Object.assign(this, header, { open });
    this.picker.addEventListener("change", () => pick(this.picker.value));
    this.retry = new Button("Retry", retry);
    this.buttons = new ButtonGroup(false, send, "Run");
    this.actions.append(this.retry.node, this.buttons.node);
  }

  // A native list of runs: it works by keyboard and on a phone.
  updateRuns(runs, picked) {
    const option = ([id, label]) => el("option", { value: id }, label);
    render(this.picker, ...[["", "No run selected"], ...runs].map(option));
    this.picker.value = picked || "";
    this.picker.hidden = !runs.length;
  }

  updateTabs(tabs, shown) {
    const tab = ([name, label]) => {
      const current = { "aria-current": name === shown ? "page" : null };
      return button(() => this.open(name), current, label);
    };
    render(this.tabs, ...tabs.map(tab));
    this.tabs.hidden = !tabs.length;
  }

  update(store) {
    const { header, answer, shownCommand, waitingFor } = store;
    this.updateRuns(header.runs, header.picked);
    this.updateTabs(header.tabs, store.tab);
    const { label, help, refused } = header.retry ?? {};
    if (label) setText(this.retry.node, label);
    this.retry.show(label ? { refused, title: refused || help } : null, waitingFor === "retry");
    this.buttons.update(answer?.status, waitingFor);
    setText(this.ack, shownCommand?.text || "");
    setAttribute(this.ack, "data-tone", shownCommand?.tone || null);
    showText(this.readOnly, header.look_only);
    this.updateSource(answer?.source);
    showText(this.trouble, store.connection || store.unreadable);
    this.updateStatus(store);
    this.updateAlerts(store);
    const { share, text } = answer ? progressOf(store) : { share: null, text: "" };
    setText(this.progressText, text);
    setText(this.details, answer ? detailsOf(store) : "");
    const noEpoch = isNumber(answer?.progress?.epoch) ? null : store.layout?.no_epoch;
    setAttribute(this.details, "title", noEpoch ?? null);
    this.fill.style.transform = `scaleX(${share ?? 0})`;
    setAttribute(this.bar, "aria-valuenow", share === null ? null : Math.round(100 * share));
    this.bar.hidden = share === null;
  }

  updateStatus({ run, answer, unreadable }) {
    const unknown = unreadable ? ["!", "Unreadable", "orange"] : ["○", "Connecting", "gray"];
    const known = STATUSES[answer?.status] ?? ["?", answer?.status, "gray"];
    const [icon, word, tone] = answer ? known : unknown;
    const badge = el("span", { class: "ss-pill ss-badge", style: `--tone:var(--ss-${tone})` });
    badge.append(el("span", { "aria-hidden": "true" }, icon), el("span", {}, word));
    badge.hidden = !run && !unreadable;
    const { reason, warnings = [], source } = answer ?? {};
    render(this.status, badge, ...(reason ? [el("span", { class: "ss-sentence" }, reason)] : []));
    const warning = (sentence) => el("div", { class: "ss-warning" }, sentence);
    const lost = source?.lost ? [source.lost] : [];
    render(this.warnings, ...[...lost, ...warnings].map(warning));
  }

  updateSource(source) {
    showText(this.source, source?.text);
    const tone = source && !source.connected ? "orange" : "gray";
    setAttribute(this.source, "style", `--tone:var(--ss-${tone})`);
    showText(this.loading, source?.note);
  }

  // The number of active alerts and the newest one; an ended run has none.
  updateAlerts({ events, ended }) {
    const active = ended ? [] : activeAlerts(events);
    const count = active.length === 1 ? "1 alert" : `${active.length} alerts`;
    const newest = active.at(-1);
    showText(this.alerts, newest ? `${count}: ${newest.text}` : "");
    setAttribute(this.alerts, "data-level", newest?.data?.level ?? null);
    setAttribute(this.alerts, "title", active.map((event) => event.text).join("\n") || null);
  }
}

// Returns the diagnosis line, null without one; its link applies a setting that the sidebar lacks.
export function verdictContent(answer, settings) {
  if (!answer?.verdict) return null;
  const { text, words, setting, tab = null } = answer.verdict;
  const line = { text, words: words || "", link: null, title: null, tab };
  if (!setting) return line;
  if (settings?.[setting.field] === setting.value) {
    const place = setting.place ? ` (sidebar: ${setting.place})` : ""; // in a collapsed group
    return { ...line, words: `${setting.text} is set for the next run${place}.`, tab: null };
  }
  const title = `Set ${setting.text} in the sidebar, for the next run. This run does not change.`;
  return { ...line, words: "", link: `Apply ${setting.text} →`, title, tab: null };
}

export class VerdictLine {
  constructor(apply, open) {
    Object.assign(this, { apply, open });
    this.node = el("p", { class: "ss-verdict", role: "note", "data-testid": "verdict" });
  }

  update({ answer, header }) {
    const content = verdictContent(answer, header?.settings);
    this.node.hidden = !content;
    if (!content) return;
    const { text, words, link, title, tab } = content;
    setAttribute(this.node, "data-kind", answer.verdict.kind);
    const parts = [el("strong", {}, text), el("span", {}, words)];
    const apply = () => this.apply(answer.verdict.setting);
    if (link) parts.push(button(apply, { class: "ss-link", title }, link));
    if (tab) parts.push(button(() => this.open(tab), { class: "ss-link" }, "Memory tab →"));
    render(this.node, ...parts.flatMap((part) => [part, document.createTextNode(" ")]));
  }
}
