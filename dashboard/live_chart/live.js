// The Run page: header, diagnosis, tiles, charts, ranks and events of a run.

import { ChartView } from "./chart_view.js";
import { el, mounting, setAttribute } from "./dom.js";
import { EventTable, Toasts, ackText, commandOf } from "./events.js";
import { ButtonGroup, Header, VerdictLine, newCommandId, sendCommand } from "./header.js";
import { RankSection } from "./ranks.js";
import { TileRow } from "./tiles.js";

const PACE_MS = 500;
const PENDING_PACE_MS = 80;
const ENDED_PACE_MS = 1_500;
const RUNS_PACE_MS = 1_000; // without a run: until a run begins

class LiveView extends ChartView {
  constructor(parent) {
    super(null, (open) => this.unfold(open));
    const send = (button, args) => this.send(button, args);
    const open = (tab) => this.openTab(tab);
    const pick = (run) => this.setTriggerValue("run", run);
    this.header = new Header({ retry: () => this.retry(), open, pick, send });
    this.memoryButtons = new ButtonGroup(true, send, "Memory");
    const apply = (setting) => this.setTriggerValue("setting", setting);
    this.verdict = new VerdictLine("verdict", apply, open);
    this.tiles = new TileRow();
    this.table = new EventTable();
    this.toasts = new Toasts();
    this.ranks = new RankSection(this.painter);
    this.overview = [
      el("div", {}, this.verdict.node, this.tiles.node),
      el("div", {}, this.board.node, this.table.node),
    ];
    const [top, rest] = this.overview;
    this.memoryBar = el("div");
    const nodes = [top, this.bar.node, rest, this.ranks.node, this.memoryBar];
    this.body = el("div", { class: "ss-body" }, ...nodes);
    const attributes = { class: "ss-root", "data-testid": "stepscope-live", "data-polls": 0 };
    this.root = el("div", attributes, this.header.node, this.body, this.toasts.node);
    parent.append(this.root);
  }

  configureParts({ run, header }) {
    this.header.place();
    this.setHeader(header);
    if (this.sentTab !== header.tab) this.showTab(header.tab);
    this.sentTab = header.tab;
    this.ranks.show(this.store.tab === "ranks" ? run : null);
  }

  openRun(run) {
    super.openRun(run);
    this.board.more.open = this.store.prefs.unfolded;
    this.table.show([], {});
    this.toasts.show([]);
    setAttribute(this.root, "data-status", null);
  }

  usePlotly(plotly) {
    super.usePlotly(plotly);
    this.ranks.draw();
  }

  setHeader(header) {
    this.store.setHeader(header);
    this.header.buttons.configure(header.buttons);
    this.memoryButtons.configure(header.buttons);
    this.showState();
  }

  setLayout(layout) {
    super.setLayout(layout);
    this.placeMemoryButtons();
    if (this.store.answer) this.showAnswer();
    else this.tiles.update(this.store);
  }

  // Moves the memory buttons to the header of the memory chart, or to the end of the Memory tab.
  placeMemoryButtons() {
    const { node } = this.memoryButtons;
    if (this.store.tab !== "memory") this.board.card("memory")?.tools.before(node);
    else if (node.parentNode !== this.memoryBar) this.memoryBar.append(node); // a move closes an open popover
  }

  unfold(open) {
    if (open === this.store.prefs.unfolded) return; // opened by openRun
    this.store.showFolded(open);
    if (!open) return;
    this.poller.restart();
    this.detail.plan();
  }

  retry() {
    this.store.ask(newCommandId(), "retry", "Starting with half the batch…");
    this.showState();
    this.setTriggerValue("retry", newCommandId());
  }

  // Shows the tab at once; the script then draws the rest of the tab.
  openTab(tab) {
    this.showTab(tab);
    this.setTriggerValue("tab", tab);
  }

  showTab(tab) {
    this.store.tab = tab;
    for (const part of this.overview) part.hidden = tab !== "overview";
    this.bar.node.hidden = !["overview", "ranks"].includes(tab);
    this.placeMemoryButtons();
    this.ranks.show(tab === "ranks" ? this.store.run : null);
    this.showState();
    this.redraw();
  }

  async send(button, args) {
    const { store } = this;
    const [id, run] = [newCommandId(), store.run];
    const label = button.label.replace("…", "");
    store.ask(id, button.name, `${label}: ${button.waiting ?? store.layout.waiting}`);
    this.showState();
    this.poller.now();
    try {
      const { said: text } = await sendCommand(run, id, button.name, args);
      if (text) store.settle(id, text, "done");
    } catch (error) {
      if (run === store.run) store.settle(id, error.message, "refused");
    }
    this.showState();
  }

  pace() {
    const { store } = this;
    if (!store.run || store.unreadable) return RUNS_PACE_MS;
    if (store.ended) return ENDED_PACE_MS;
    // A profile lasts many steps, and frequent polls in the same process would disturb it.
    return store.waitingFor && store.waitingFor !== "profile" ? PENDING_PACE_MS : PACE_MS;
  }

  show(answer, fresh, first) {
    const { store } = this;
    if (fresh.length) this.table.show(store.events, store.layout.metrics);
    if (!first) {
      this.acknowledge(store.news);
      this.toasts.take(store.news);
    }
    this.showAnswer();
    setAttribute(this.root, "data-status", answer.status);
  }

  // Shows the outcome of a command, also of a command from another browser tab.
  acknowledge(fresh) {
    for (const event of fresh) {
      const tone = event.data?.ok === false ? "refused" : "done";
      const id = commandOf(event);
      if (id !== null) this.store.settle(id, ackText(event), tone, event.kind);
    }
  }

  setTrouble(sentence) {
    if (sentence === this.store.connection) return;
    this.store.connection = sentence;
    this.showState();
  }

  refused(sentence) {
    this.store.unreadable = `${sentence} Choose another run, or start one.`;
    this.showState();
  }

  showAnswer() {
    this.showState();
    this.tiles.update(this.store);
    this.board.refresh(this.store);
  }

  showState() {
    const { store } = this;
    this.header.update(store);
    this.memoryButtons.update(store.answer?.status, store.waitingFor);
    this.verdict.update(store);
    this.body.hidden = !store.run || Boolean(store.unreadable);
  }

  moved() {
    this.ranks.follow();
    super.moved();
  }

  close() {
    this.ranks.close();
    super.close();
  }
}

export const stepscopeLive = mounting("stepscopeViews", LiveView);
