// The view of a run: header, numbers, charts, ranks and events.

import { ButtonGroup, newCommandId, sendCommand } from "./commands.js";
import { ChartView } from "./chart_view.js";
import { mounting, parts, setAttribute } from "./dom.js";
import { EventTable, ackText, commandOf } from "./events.js";
import { Header, VerdictLine } from "./header.js";
import { RankSection } from "./ranks.js";
import { TileRow } from "./tiles.js";
import { Toasts } from "./toasts.js";

const PACE_MS = 500;
const PENDING_PACE_MS = 80;
const ENDED_PACE_MS = 1_500;
const RUNS_PACE_MS = 1_000; // no run is shown: one may begin

class LiveView extends ChartView {
  constructor(parent) {
    super(null, (open) => this.unfold(open));
    const send = (button, args) => this.send(button, args);
    const open = (tab) => this.openTab(tab);
    const pick = (run) => this.setTriggerValue("run", run);
    this.header = new Header({ retry: () => this.retry(), open, pick, send });
    this.memoryButtons = new ButtonGroup(true, send, "Memory");
    this.verdict = new VerdictLine((setting) => this.setTriggerValue("setting", setting), open);
    this.tiles = new TileRow();
    this.table = new EventTable();
    this.toasts = new Toasts();
    this.ranks = new RankSection(this.painter);
    this.inOverview = [this.verdict, this.tiles, this.board, this.table];
    const root = parts(`<div class="ss-root" data-testid="stepscope-live" data-polls="0">
      <div class="ss-body" ref="body"></div></div>`);
    this.root = root.node;
    this.body = root.body;
    this.memoryBar = parts(`<div class="ss-memory-bar"></div>`).node;
    const shown = [this.verdict, this.tiles, this.bar, this.board, this.ranks, this.table];
    this.body.append(...shown.map(({ node }) => node), this.memoryBar);
    this.root.prepend(this.header.node);
    this.root.append(this.toasts.node);
    parent.append(this.root);
  }

  // --- configuration from Python ---

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
    this.table.clear();
    this.toasts.clear();
    setAttribute(this.root, "data-status", null);
  }

  usePlotly(plotly) {
    super.usePlotly(plotly);
    this.ranks.draw();
  }

  setHeader(header) {
    this.store.setHeader(header);
    const text = JSON.stringify(header.buttons);
    if (this.buttonsText !== text) {
      this.buttonsText = text;
      this.header.configure(header);
      this.memoryButtons.configure(header.buttons);
    }
    this.showState();
  }

  setLayout(layout) {
    super.setLayout(layout);
    this.tiles.configure(layout);
    this.placeMemoryButtons();
    if (this.store.answer) this.showAnswer();
  }

  // In the head of the memory chart; on the Memory tab, which shows another, at the end.
  placeMemoryButtons() {
    const { node } = this.memoryButtons;
    if (this.store.tab !== "memory") this.board.card("memory")?.putInHead(node);
    else if (node.parentNode !== this.memoryBar) this.memoryBar.append(node); // a move closes it
  }

  unfold(open) {
    if (open === this.store.prefs.unfolded) return; // it was us who opened it
    this.store.showFolded(open);
    if (!open) return;
    this.poller.restart();
    this.detail.plan();
  }

  // --- what is pressed: shown before anything else happens ---

  retry() {
    this.store.ask(newCommandId(), "retry", "Starting with half the batch…");
    this.showState();
    this.setTriggerValue("retry", newCommandId());
  }

  // Shows the tab at once; the script then draws what stands below.
  openTab(tab) {
    this.showTab(tab);
    this.setTriggerValue("tab", tab);
  }

  showTab(tab) {
    this.store.tab = tab;
    for (const part of this.inOverview)
      part.node.classList.toggle("ss-elsewhere", tab !== "overview");
    this.bar.node.classList.toggle("ss-elsewhere", !["overview", "ranks"].includes(tab));
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
      const { said } = await sendCommand(run, id, button.name, args);
      if (said) store.settle(id, said, "done");
    } catch (error) {
      if (run === store.run) store.settle(id, error.message, "refused");
    }
    this.showState();
  }

  // --- answers ---

  pace() {
    const { store } = this;
    if (!store.run || store.unreadable) return RUNS_PACE_MS;
    if (store.ended) return ENDED_PACE_MS;
    // A profile takes many steps, which polls in the same process would disturb.
    return store.waitingFor && store.waitingFor !== "profile" ? PENDING_PACE_MS : PACE_MS;
  }

  show(answer, fresh, first) {
    const { store } = this;
    if (fresh.length) this.table.show(store.events, store.layout.metrics);
    if (!first) {
      this.acknowledge(fresh);
      this.toasts.take(fresh);
    }
    this.showAnswer();
    setAttribute(this.root, "data-status", answer.status);
  }

  // Shows what became of a command, also of one from another tab.
  acknowledge(fresh) {
    for (const event of fresh) {
      const tone = event.data?.ok === false ? "refused" : "done";
      const first = event.data?.rank === undefined; // what the other ranks did stands in the table
      const id = commandOf(event);
      if (id !== null && (first || tone === "refused"))
        this.store.settle(id, ackText(event), tone, event.kind);
    }
  }

  // The sentence while the server does not answer, null once it does.
  setTrouble(sentence) {
    if (sentence === this.store.connection) return;
    this.store.setConnection(sentence);
    this.showState();
  }

  refused(sentence) {
    this.store.setUnreadable(`${sentence} Choose another run, or start one.`);
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
