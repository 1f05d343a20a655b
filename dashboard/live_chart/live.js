// The Run page: header, diagnosis, tiles, charts and events of a run. One state, updated by polls.

import { AxisBar, Board } from "./chart_grid.js";
import { el, loadPlotly, mounting, setAttribute } from "./dom.js";
import { EventTable, ackText, commandOf } from "./events.js";
import { ButtonGroup, Header, VerdictLine, newCommandId, sendCommand } from "./header.js";
import { Painter } from "./painter.js";
import { Poller, ZoomDetail } from "./poll.js";
import { Store } from "./store.js";
import { readTheme } from "./theme.js";
import { TileRow } from "./tiles.js";

const PACE_MS = 500;
const PENDING_PACE_MS = 80;
const ENDED_PACE_MS = 1_500;
const RUNS_PACE_MS = 1_000; // without a run: until a run begins
const MIN_RERUN_MS = 5_000; // between two script runs for the same page token

export class LiveView {
  constructor(parent) {
    this.polls = 0;
    this.store = new Store(() => this.moved());
    this.bar = new AxisBar(this.store);
    this.painter = new Painter(
      this.store,
      () => this.board.cards,
      () => setAttribute(this.root, "data-ready", 1),
    );
    this.board = new Board(this.painter, (open) => this.unfold(open));
    this.painter.restWhileDragging(this.board.node);
    const trouble = (sentence) => this.setTrouble(sentence);
    this.detail = new ZoomDetail(this.store, () => this.redraw(), trouble);
    const send = (button, args) => this.send(button, args);
    const open = (tab) => this.openTab(tab);
    const pick = (run) => this.setTriggerValue("run", run);
    this.header = new Header({ retry: () => this.retry(), open, pick, send });
    this.memoryButtons = new ButtonGroup(true, send, "Memory");
    const apply = (setting) => this.setTriggerValue("setting", setting);
    this.verdict = new VerdictLine(apply, open);
    this.tiles = new TileRow();
    this.table = new EventTable();
    const { board, table, bar } = this;
    this.overview = el("div", {}, this.verdict.node, this.tiles.node, bar.node);
    this.overview.append(board.node, table.node);
    this.memoryBar = el("div");
    this.body = el("div", { class: "ss-body" }, this.overview, this.memoryBar);
    const attributes = { class: "ss-root", "data-testid": "stepscope-live", "data-polls": 0 };
    this.root = el("div", attributes, this.header.node, this.body);
    parent.append(this.root);
    this.poller = new Poller({
      url: () => this.address(),
      pace: () => this.pace(),
      take: (answer) => this.take(answer),
      refused: (sentence) => this.refused(sentence),
      trouble,
    });
  }

  // Applies Python's data: {run, layout, plotly, page_token, header}.
  configure(data, setTriggerValue) {
    Object.assign(this, { data, setTriggerValue });
    this.painter.theme = readTheme(this.root);
    const other = this.store.run !== data.run;
    if (other) this.openRun(data.run);
    this.setHeader(data.header);
    if (this.sentTab !== data.header.tab) this.showTab(data.header.tab);
    this.sentTab = data.header.tab;
    const text = JSON.stringify(data.layout);
    if (data.layout && (other || this.layoutText !== text)) {
      this.layoutText = text;
      this.setLayout(data.layout);
    }
    if (data.run && !this.painter.Plotly) {
      loadPlotly(data.plotly).then(
        (plotly) => this.painter.usePlotly(plotly),
        (error) => this.setTrouble(error.message),
      );
    }
    this.redraw();
    if (other || this.store.needsAllRows) this.poller.restart();
    else this.poller.now();
  }

  openRun(run) {
    this.store.open(run);
    this.board.clear();
    this.detail.plan();
    this.board.more.open = this.store.prefs.unfolded;
    this.table.show([], {});
    for (const name of ["data-ready", "data-status"]) setAttribute(this.root, name, null);
  }

  setHeader(header) {
    this.store.setHeader(header);
    this.header.buttons.configure(header.buttons);
    this.memoryButtons.configure(header.buttons);
    this.showState();
  }

  setLayout(layout) {
    this.store.setLayout(layout);
    this.board.set(layout);
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
    this.overview.hidden = tab !== "overview";
    this.placeMemoryButtons();
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

  // Of a run that cannot be read, the list of runs and the run are requested in turn.
  address() {
    const { store } = this;
    this.asksForRuns = !store.run || (Boolean(store.unreadable) && !this.asksForRuns);
    if (this.asksForRuns) return "/api/series";
    return `/api/series?${new URLSearchParams(store.question())}`;
  }

  take(answer) {
    if (answer.series) this.takeSeries(answer);
    this.reportStale(answer.page_token);
  }

  takeSeries(answer) {
    const { store } = this;
    store.unreadable = null;
    const [before, { axis, needsAllRows }, first] = [store.extent(), store, !store.answer];
    const fresh = store.take(answer);
    if (first) this.detail.plan(); // a zoom from before a reload
    if (fresh.length) this.table.show(store.events, store.layout.metrics);
    if (!first) this.acknowledge(fresh);
    this.showAnswer();
    setAttribute(this.root, "data-status", answer.status);
    this.polls += 1;
    setAttribute(this.root, "data-polls", this.polls);
    this.detail.follow();
    if (store.axis !== axis)
      this.moved(); // the first step was recorded
    else if (needsAllRows) this.redraw();
    else this.painter.markStale(before, fresh.length > 0, new Set(Object.keys(answer.series)));
  }

  // Reruns the page's script if the server has another page token, and again after MIN_RERUN_MS.
  reportStale(token) {
    const now = performance.now();
    const { run, unreadable } = this.store;
    const listing = this.data.page_token.split("-")[0];
    const known = run && !unreadable ? this.data.page_token : listing;
    if (token === known) return;
    if (token === this.reported && now - this.reportedAt < MIN_RERUN_MS) return;
    [this.reported, this.reportedAt] = [token, now];
    this.setTriggerValue("stale", token);
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
    this.detail.plan();
    this.redraw();
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
    this.root.remove();
  }
}

export const stepscopeLive = mounting("stepscopeViews", LiveView);
