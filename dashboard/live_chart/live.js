// The view: one per mounted component, from mount to unmount. It puts the parts together.

import { AxisBar } from "./axisbar.js";
import { Board } from "./chart_grid.js";
import { ButtonGroup, newCommandId, sendCommand } from "./commands.js";
import { Detail } from "./zoom_detail.js";
import { el, setAttribute } from "./dom.js";
import { EventTable, ackText, commandOf } from "./events.js";
import { Header } from "./header.js";
import { mounting } from "./mount.js";
import { Painter } from "./painter.js";
import { loadPlotly } from "./plotly.js";
import { Poller } from "./poll.js";
import { RankSection } from "./ranks.js";
import { Store } from "./store.js";
import { readTheme } from "./theme.js";
import { TileRow } from "./tiles.js";
import { Toasts } from "./toasts.js";
import { VerdictLine } from "./verdict.js";

const PACE_MS = 500;
const PENDING_PACE_MS = 80;
const ENDED_PACE_MS = 1_500;
const RUNS_PACE_MS = 1_000; // no run is shown: one may begin
const TELL_AGAIN_MS = 5_000;

class LiveView {
  constructor(parent) {
    this.polls = 0;
    this.store = new Store(
      () => this.moved(),
      () => this.wanted(),
    );
    const send = (button, args) => this.send(button, args);
    this.header = new Header({
      retry: () => this.retry(),
      open: (tab) => this.openTab(tab),
      pick: (run) => this.setTriggerValue("run", run),
      send,
    });
    this.memoryButtons = new ButtonGroup(true, send, "Memory");
    this.verdict = new VerdictLine(
      (setting) => this.setTriggerValue("setting", setting),
      (tab) => this.openTab(tab),
    );
    this.tiles = new TileRow();
    this.bar = new AxisBar(this.store);
    this.table = new EventTable();
    this.toasts = new Toasts();
    this.painter = new Painter(
      this.store,
      () => this.board.cards,
      () => setAttribute(this.root, "data-ready", 1),
    );
    this.board = new Board(this.painter, this.memoryButtons.node, (open) => this.unfold(open));
    this.painter.restWhileDragging(this.board.node);
    this.ranks = new RankSection(
      () => this.painter.theme,
      () => this.store.axis,
    );
    const trouble = (sentence) => this.setTrouble(sentence);
    this.detail = new Detail(this.store, () => this.redraw(), trouble);
    this.poller = new Poller({
      url: () => this.address(),
      pace: () => this.pace(),
      take: (answer) => this.take(answer),
      refused: (sentence) => this.refused(sentence),
      trouble,
    });
    const parts = [this.verdict, this.tiles, this.bar, this.board, this.ranks, this.table];
    this.inOverview = [this.verdict, this.tiles, this.board, this.table];
    this.memoryBar = el("div", { class: "ss-memory-bar" });
    this.body = el("div", { class: "ss-body" }, ...parts.map((part) => part.node), this.memoryBar);
    this.root = el(
      "div",
      { class: "ss-root", "data-testid": "stepscope-live", "data-polls": 0 },
      this.header.node,
      this.body,
      this.toasts.node,
    );
    parent.append(this.root);
  }

  // --- configuration from Python ---

  configure(data, setTriggerValue) {
    this.setTriggerValue = setTriggerValue;
    this.data = data;
    this.painter.useTheme(readTheme(this.root));
    const other = this.store.run !== data.run;
    if (other) this.openRun(data.run);
    this.header.place();
    this.setHeader(data.header);
    const text = JSON.stringify(data.layout);
    if (data.layout && (other || this.layoutText !== text)) this.setLayout(data.layout, text);
    if (this.sentTab !== data.header.tab) this.showTab(data.header.tab);
    this.sentTab = data.header.tab;
    this.ranks.show(this.store.tab === "ranks" ? data.run : null);
    if (data.run && !this.painter.Plotly) {
      loadPlotly(data.plotly).then(
        (plotly) => this.painter.usePlotly(plotly),
        (error) => this.setTrouble(error.message),
      );
    }
    this.redraw();
    if (other || this.store.afresh) this.poller.restart();
    else this.poller.now();
  }

  openRun(run) {
    this.store.open(run);
    this.board.clear();
    this.board.unfold(this.store.prefs.unfolded);
    this.table.clear();
    this.toasts.clear();
    setAttribute(this.root, "data-ready", null);
    setAttribute(this.root, "data-status", null);
    this.detail.plan();
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

  setLayout(layout, text) {
    this.layoutText = text;
    this.store.setLayout(layout);
    this.tiles.configure(layout);
    this.board.set(layout);
    if (this.store.answer) this.showAnswer();
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
    if (tab === "memory") this.memoryBar.append(this.memoryButtons.node);
    else this.board.placeMemoryButtons();
    this.ranks.show(tab === "ranks" ? this.store.run : null);
    this.showState();
    this.redraw();
  }

  async send(button, args) {
    const { store } = this;
    const [id, run] = [newCommandId(), store.run];
    store.ask(id, button.name, `${button.label}: ${button.waiting ?? store.layout.waiting}`);
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

  address() {
    const { store } = this;
    if (!store.run || store.unreadable) return "/api/runs";
    return `/api/series?${new URLSearchParams(store.question())}`;
  }

  pace() {
    const { store } = this;
    if (!store.run || store.unreadable) return RUNS_PACE_MS;
    if (store.ended) return ENDED_PACE_MS;
    // A profile takes many steps, which polls in the same process would disturb.
    return store.waitingFor && store.waitingFor !== "profile" ? PENDING_PACE_MS : PACE_MS;
  }

  take(answer) {
    if (answer.series) this.takeSeries(answer);
    this.tellStale(answer.page_token);
  }

  takeSeries(answer) {
    const { store } = this;
    const [before, axis, first] = [store.extent(), store.axis, !store.answer];
    const { afresh } = store;
    const fresh = store.take(answer);
    if (first) this.detail.plan(); // a zoom kept from before a reload
    if (fresh.length) this.table.show(store.events, store.layout.metrics);
    if (!first) {
      this.acknowledge(fresh);
      this.toasts.take(fresh);
    }
    this.showAnswer();
    this.polls += 1;
    setAttribute(this.root, "data-polls", this.polls);
    setAttribute(this.root, "data-status", answer.status);
    this.detail.follow();
    if (store.axis !== axis)
      this.moved(); // the first step has come
    else if (afresh) this.redraw();
    else this.painter.markStale(before, fresh.length > 0, new Set(Object.keys(answer.series)));
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

  // The page around the charts is of before: it runs again. Said once, and again should it not hear.
  tellStale(token) {
    const now = performance.now();
    const { run, unreadable } = this.store;
    const listing = this.data.page_token.split("-")[0];
    const known = run && !unreadable ? this.data.page_token : listing;
    if (token === known || (token === this.told && now - this.toldAt < TELL_AGAIN_MS)) return;
    [this.told, this.toldAt] = [token, now];
    this.setTriggerValue("stale", token);
  }

  // --- drawing ---

  // Another part of the horizontal axis, or another axis, is shown.
  moved() {
    this.painter.hover(null, null);
    this.detail.plan();
    this.ranks.follow();
    this.redraw();
  }

  // The reader looks at what was not asked for before.
  wanted() {
    this.poller.now();
    this.detail.plan();
  }

  redraw() {
    this.bar.update();
    const { zoom } = this.store;
    setAttribute(this.root, "data-zoom", zoom ? zoom.join() : null);
    this.painter.redrawAll();
  }

  close() {
    this.poller.close();
    this.detail.close();
    this.painter.close();
    this.board.close();
    this.ranks.close();
    this.root.remove();
  }
}

export const stepscopeLive = mounting("stepscopeViews", LiveView);
