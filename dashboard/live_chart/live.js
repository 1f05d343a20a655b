// The view of a run: one per mounted component, from mount to unmount. It puts the parts together.

import { AxisBar } from "./axisbar.js";
import { Board } from "./board.js";
import { Detail } from "./detail.js";
import { el, setAttribute } from "./dom.js";
import { EventTable, ackText, commandOf } from "./events.js";
import { Header } from "./header.js";
import { Painter } from "./painter.js";
import { loadPlotly } from "./plotly.js";
import { Poller } from "./poll.js";
import { Store } from "./store.js";
import { readTheme } from "./theme.js";
import { TileRow } from "./tiles.js";

const PACE_MS = 500;
const PENDING_PACE_MS = 80;
const PENDING_MAX_MS = 5_000;
const ENDED_PACE_MS = 1_500;
const TELL_AGAIN_MS = 5_000;

class LiveView {
  constructor(parent) {
    this.polls = 0;
    this.store = new Store(() => this.moved());
    this.header = new Header();
    this.tiles = new TileRow();
    this.bar = new AxisBar(this.store);
    this.table = new EventTable();
    this.painter = new Painter(
      this.store,
      () => this.board.cards,
      () => setAttribute(this.root, "data-ready", 1),
    );
    this.board = new Board(this.painter, (open) => this.unfold(open));
    this.painter.restWhileDragging(this.board.node);
    const trouble = (sentence) => this.header.setTrouble(sentence);
    this.detail = new Detail(this.store, () => this.redraw(), trouble);
    this.poller = new Poller({
      url: () => `/api/series?${new URLSearchParams(this.store.question())}`,
      pace: () => this.pace(),
      take: (answer) => this.take(answer),
      trouble,
    });
    const parts = [this.header, this.tiles, this.bar, this.board, this.table];
    this.root = el(
      "div",
      { class: "ss-root", "data-testid": "stepscope-live", "data-polls": 0 },
      ...parts.map((part) => part.node),
    );
    parent.append(this.root);
  }

  // --- configuration from Python ---

  configure(data, setTriggerValue) {
    this.setTriggerValue = setTriggerValue;
    this.data = data;
    this.painter.useTheme(readTheme(this.root));
    const text = JSON.stringify(data.layout);
    const other = this.store.run !== data.run;
    if (other) this.openRun(data.run);
    if (other || this.layoutText !== text) this.setLayout(data.layout, text);
    if (!this.painter.Plotly) {
      loadPlotly(data.plotly).then(
        (plotly) => this.painter.usePlotly(plotly),
        (error) => this.header.setTrouble(error.message),
      );
    }
    if (data.pending_command !== this.pending) this.expect(data.pending_command);
    this.redraw();
    if (other || this.store.afresh) this.poller.restart();
    else this.poller.now();
  }

  openRun(run) {
    this.store.open(run);
    this.pending = null;
    this.board.clear();
    this.board.unfold(this.store.prefs.optimizer);
    this.table.clear();
    this.header.setAck("");
    setAttribute(this.root, "data-ready", null);
    this.detail.plan();
  }

  setLayout(layout, text) {
    this.layoutText = text;
    this.store.setLayout(layout);
    this.header.configure(layout);
    this.tiles.configure(layout.kpis);
    this.board.set(layout);
    if (this.store.answer) this.showAnswer();
  }

  unfold(open) {
    if (open === this.store.prefs.optimizer) return; // it was us who opened it
    this.store.showOptimizer(open);
    if (!open) return;
    this.poller.restart();
    this.detail.plan();
  }

  // --- answers ---

  pace() {
    if (this.pending !== null && performance.now() - this.pendingSince < PENDING_MAX_MS)
      return PENDING_PACE_MS;
    return this.store.ended ? ENDED_PACE_MS : PACE_MS;
  }

  expect(command) {
    this.pending = command ?? null;
    if (this.pending === null) return;
    this.pendingSince = performance.now();
    const done = this.store.events.findLast((event) => commandOf(event) === command);
    if (done) this.acknowledge(done);
    else this.header.setAck(this.data.layout.waiting, "waiting");
  }

  acknowledge(event) {
    if (commandOf(event) === this.pending) this.pendingSince = -PENDING_MAX_MS;
    this.header.setAck(ackText(event), event.data?.ok === false ? "refused" : "done");
  }

  take(answer) {
    const { store } = this;
    const [before, axis, first] = [store.extent(), store.axis, !store.answer];
    const fresh = store.take(answer);
    if (first) this.detail.plan(); // a zoom kept from before a reload
    if (fresh.length) this.showEvents(fresh);
    this.showAnswer();
    this.tellStale(answer.page_token);
    this.polls += 1;
    setAttribute(this.root, "data-polls", this.polls);
    setAttribute(this.root, "data-status", answer.status);
    this.detail.follow();
    if (store.axis !== axis)
      this.moved(); // the first step has come
    else this.painter.markStale(before, fresh.length > 0, new Set(Object.keys(answer.series)));
  }

  showAnswer() {
    this.header.update(this.store);
    this.tiles.update(this.store);
    this.board.refresh(this.store.live.steps);
  }

  showEvents(fresh) {
    this.table.add(fresh, this.store.layout.metrics, this.store.events.length);
    const answered = fresh.findLast((event) => commandOf(event) !== null);
    if (answered) this.acknowledge(answered);
  }

  // The page around the charts is of before: it runs again. Said once, and again should it not hear.
  tellStale(token) {
    const now = performance.now();
    if (
      token === this.data.page_token ||
      (token === this.told && now - this.toldAt < TELL_AGAIN_MS)
    )
      return;
    [this.told, this.toldAt] = [token, now];
    this.setTriggerValue("stale", token);
  }

  // --- drawing ---

  // Another part of the horizontal axis, or another axis, is shown.
  moved() {
    this.painter.hover(null, null);
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

// Streamlit calls this again on the same parent when `data` or the theme changes.
const views = (globalThis.stepscopeViews ??= new WeakMap());

export function stepscopeLive({ data, parentElement, setTriggerValue }) {
  let view = views.get(parentElement);
  if (!view) views.set(parentElement, (view = new LiveView(parentElement)));
  view.configure(data, setTriggerValue);
  return () => {
    view.close();
    views.delete(parentElement);
  };
}
