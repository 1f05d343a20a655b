// The row that stays in sight: the run, its status and progress, and the buttons; below it the result
// of the last command, warnings, and the tabs.

import { ButtonGroup, RetryButton } from "./commands.js";
import { el, parts, say, setAttribute, setText } from "./dom.js";
import { clock, isNumber, withUnit } from "./format.js";
import { latest, secondsLeft } from "./series.js";
import { activeAlerts } from "./toasts.js";

const STATUSES = {
  pending: ["○", "Pending"],
  running: ["●", "Running"],
  paused: ["Ⅱ", "Paused"],
  finished: ["✓", "Finished"],
  stopped: ["■", "Stopped"],
  failed: ["✕", "Failed"],
  crashed: ["!", "Crashed"],
};

const counted = (value) => value.toLocaleString("en-US");

// "2,244 / 30,600 · 7 % · 3:03 left", as far as it is known; `share` is null where it is not.
export function progressOf({ answer, live, ended }) {
  const { step, total_steps: total } = answer.progress || {};
  const share = isNumber(step) && total > 0 ? Math.min(1, step / total) : null;
  const moves = !ended && answer.status !== "paused";
  const left = moves ? secondsLeft(live.steps, answer.progress) : null;
  const parts = [
    isNumber(step) ? `step ${counted(step)}${isNumber(total) ? ` of ${counted(total)}` : ""}` : "",
    share === null ? "" : `${Math.floor(100 * share)} %`,
    left === null ? "" : `${clock(left)} left`,
  ];
  return { share, text: parts.filter(Boolean).join(" · ") };
}

// Epoch, time since the beginning, and what the sampler costs.
export function detailsOf({ answer, live, ended }) {
  const { epoch, epochs } = answer.progress || {};
  const times = Object.values(live).map((series) => series.t.at(-1) ?? 0);
  const elapsed = ended ? Math.max(...times, 0) : answer.now;
  const cost = ended ? null : latest(live.samples, "sampler/cost");
  const parts = [
    isNumber(epoch)
      ? `epoch ${counted(epoch)}${isNumber(epochs) ? ` of ${counted(epochs)}` : ""}`
      : "",
    isNumber(elapsed) ? `elapsed ${clock(elapsed)}` : "",
    cost === null ? "" : `Stepscope: ${withUnit(cost, "s")} a sample`,
  ];
  return parts.filter(Boolean).join(" · ");
}

export class Header {
  // `retry()`, `pick(run)`, `open(tab)` and `send(button, args)` are called for what is pressed.
  constructor({ retry, pick, open, send }) {
    const header =
      parts(`<div class="ss-header" role="region" aria-label="Run" data-testid="header">
      <div class="ss-row">
        <div class="ss-status" role="status" data-testid="status">
          <span class="ss-badge" ref="badge">
            <span class="ss-icon" aria-hidden="true" ref="icon"></span><span ref="word"></span>
          </span>
          <span class="ss-sentence" ref="sentence"></span>
        </div>
        <span class="ss-alerts" data-testid="alerts" hidden ref="alerts"></span>
        <select class="ss-picker" aria-label="Run" ref="picker"
          title="Shown run. Live runs first, then newest."></select>
        <span class="ss-progress-text" data-testid="progress" ref="progressText"></span>
        <div class="ss-actions" ref="actions"></div>
      </div>
      <div class="ss-row ss-second">
        <span class="ss-ack" role="status" data-testid="ack" ref="ack"></span>
        <span class="ss-details" ref="details"></span>
      </div>
      <p class="ss-look-only" ref="lookOnly"></p>
      <p class="ss-trouble" role="alert" data-testid="trouble" ref="trouble"></p>
      <div role="status" data-testid="warnings" ref="warnings"></div>
      <div class="ss-track" role="progressbar" aria-label="Training progress" aria-valuemin="0"
        aria-valuemax="100" ref="bar"><div class="ss-fill" ref="fill"></div></div>
      <nav class="ss-tabs" aria-label="Views of the run" ref="tabs"></nav>
    </div>`);
    Object.assign(this, header, { open });
    this.picker.addEventListener("change", () => pick(this.picker.value));
    this.retry = new RetryButton(retry);
    this.buttons = new ButtonGroup(false, send, "Run");
    this.actions.append(this.retry.node, this.buttons.node);
  }

  configure({ buttons }) {
    this.buttons.configure(buttons);
  }

  // Sticks below Streamlit's own bar, which lies over the page.
  place() {
    const bar = document.querySelector("[data-testid=stHeader]");
    const height = bar ? bar.getBoundingClientRect().height : 0;
    this.node.style.setProperty("--ss-top", `${height}px`);
  }

  // The list of runs; a native one, so that it works by keyboard and on a phone.
  updateRuns(runs, picked) {
    const text = JSON.stringify(runs);
    if (text !== this.runsText) {
      this.runsText = text;
      const option = ([id, label]) => el("option", { value: id }, label);
      this.picker.replaceChildren(option(["", "No run selected"]), ...runs.map(option));
    }
    this.picker.value = picked || "";
    this.picker.hidden = !runs.length;
  }

  // `tabs` is a list of [name, label]; empty without a run.
  updateTabs(tabs, shown) {
    const text = JSON.stringify(tabs);
    if (text !== this.tabsText) {
      this.tabsText = text;
      const button = ([name, label]) =>
        el("button", { type: "button", "data-tab": name, onclick: () => this.open(name) }, label);
      this.tabs.replaceChildren(...tabs.map(button));
    }
    for (const each of this.tabs.children)
      setAttribute(each, "aria-current", each.dataset.tab === shown ? "page" : null);
    this.tabs.hidden = !tabs.length;
  }

  update(store) {
    const { header, answer, told } = store;
    this.updateRuns(header.runs, header.picked);
    this.updateTabs(header.tabs, store.tab);
    if (header.retry) this.retry.update(header.retry, store.waitingFor === "retry");
    else this.retry.hide();
    this.buttons.update(answer?.status, store.waitingFor);
    setText(this.ack, told?.text || "");
    setAttribute(this.ack, "data-tone", told?.tone || null);
    say(this.lookOnly, header.look_only);
    say(this.trouble, store.connection || store.unreadable);
    this.updateStatus(store);
    this.updateAlerts(store);
    const { share, text } = answer ? progressOf(store) : { share: null, text: "" };
    setText(this.progressText, text);
    setText(this.details, answer ? detailsOf(store) : "");
    const noEpoch = isNumber(answer?.progress?.epoch) ? null : store.layout?.no_epoch;
    setAttribute(this.details, "title", noEpoch ?? null);
    this.fill.style.transform = `scaleX(${share ?? 0})`;
    setAttribute(this.bar, "aria-valuenow", share === null ? null : Math.round(100 * share));
    this.bar.hidden = share === null; // nobody knows how far there is to go
  }

  updateStatus({ run, answer, unreadable }) {
    const unknown = unreadable ? ["!", "Unreadable"] : ["○", "Connecting"];
    const [icon, word] = answer ? STATUSES[answer.status] || ["?", answer.status] : unknown;
    setText(this.icon, icon);
    setText(this.word, word);
    setAttribute(this.badge, "data-status", answer?.status ?? (unreadable ? "failed" : null));
    this.badge.hidden = !run && !unreadable;
    setText(this.sentence, answer?.reason || "");
    this.warn(answer?.warnings || []);
  }

  // How many alerts are raised now; of an ended run nothing is.
  updateAlerts({ events, ended }) {
    const active = ended ? [] : activeAlerts(events);
    this.alerts.hidden = !active.length;
    setText(this.alerts, active.length === 1 ? "1 alert" : `${active.length} alerts`);
    setAttribute(this.alerts, "title", active.map((event) => event.text).join("\n") || null);
  }

  // Sentences that stay are left alone: a screen reader says only what is new.
  warn(sentences) {
    while (this.warnings.childElementCount > sentences.length)
      this.warnings.lastElementChild.remove();
    sentences.forEach((sentence, i) => {
      if (!this.warnings.children[i]) this.warnings.append(el("div", { class: "ss-warning" }));
      setText(this.warnings.children[i], sentence);
    });
  }
}

// What the line shows: its text, words after it, the label of the link and its title, and the tab with
// the details; null for no line. A setting that the sidebar already has is no link.
export function verdictContent(answer, settings) {
  const verdict = answer?.verdict;
  if (!verdict) return null;
  const { text, words, setting, tab } = verdict;
  if (!setting) return { text, words: words || "", link: null, title: null, ...(tab && { tab }) };
  if (settings?.[setting.field] === setting.value) {
    const place = setting.place ? ` (sidebar: ${setting.place})` : ""; // in a collapsed group
    return {
      text,
      words: `${setting.text} is set for the next run${place}.`,
      link: null,
      title: null,
    };
  }
  const title = `Set ${setting.text} in the sidebar, for the next run. This run does not change.`;
  return { text, words: "", link: `Apply ${setting.text} →`, title };
}

export class VerdictLine {
  // `take(setting)` and `open(tab)` are called for a press on the links.
  constructor(take, open) {
    this.take = take;
    this.pressedAt = null; // the header when the link was pressed; the script has not answered yet
    this.tab = null;
    const line = parts(`<p class="ss-verdict" role="note" data-testid="verdict" hidden>
      <span class="ss-verdict-text" ref="text"></span> <span ref="words"></span> <button
      class="ss-verdict-link" ref="link"></button> <button
      class="ss-verdict-link" ref="more">Memory tab →</button></p>`);
    Object.assign(this, line);
    this.link.addEventListener("click", () => this.press());
    this.more.addEventListener("click", () => open(this.tab));
  }

  press() {
    const { header, answer } = this.store;
    const { setting } = answer.verdict;
    this.pressedAt = header;
    this.taken = { [setting.field]: setting.value };
    this.take(setting);
    this.update(this.store);
  }

  update(store) {
    this.store = store;
    const { answer, header } = store;
    const taken = this.pressedAt === header ? this.taken : {};
    const content = verdictContent(answer, { ...header?.settings, ...taken });
    this.node.hidden = !content;
    if (!content) return;
    setAttribute(this.node, "data-kind", answer.verdict.kind);
    setText(this.text, content.text);
    setText(this.words, content.words);
    setText(this.link, content.link || "");
    setAttribute(this.link, "title", content.title);
    this.link.hidden = !content.link;
    this.words.hidden = !content.words;
    this.tab = content.tab ?? null;
    this.more.hidden = !content.tab;
  }
}
