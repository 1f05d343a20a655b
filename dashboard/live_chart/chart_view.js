// The base class of views with charts of a run: one state, updated by polls, on one horizontal axis.

import { AxisBar, Board } from "./chart_grid.js";
import { loadPlotly, setAttribute } from "./dom.js";
import { Painter } from "./painter.js";
import { Poller, ZoomDetail } from "./poll.js";
import { Store } from "./store.js";
import { readTheme } from "./theme.js";

const MIN_RERUN_MS = 5_000; // between two script runs for the same page token

export class ChartView {
  // `only` is the one requested series, null for all drawn series; `unfolded(open)` is called when the
  // collapsed charts are expanded or collapsed.
  constructor(only = null, unfolded = () => {}) {
    this.polls = 0;
    this.store = new Store(() => this.moved(), only);
    this.bar = new AxisBar(this.store);
    this.painter = new Painter(
      this.store,
      () => this.board.cards,
      () => setAttribute(this.root, "data-ready", 1),
    );
    this.board = new Board(this.painter, unfolded);
    this.painter.restWhileDragging(this.board.node);
    const trouble = (sentence) => this.setTrouble(sentence);
    this.detail = new ZoomDetail(this.store, () => this.redraw(), trouble);
    this.poller = new Poller({
      url: () => this.address(),
      pace: () => this.pace(),
      take: (answer) => this.take(answer),
      refused: (sentence) => this.refused(sentence),
      trouble,
    });
  }

  // Applies Python's data: {run, layout, plotly, page_token}.
  configure(data, setTriggerValue) {
    Object.assign(this, { data, setTriggerValue });
    this.painter.theme = readTheme(this.root);
    const other = this.store.run !== data.run;
    if (other) this.openRun(data.run);
    this.configureParts(data);
    const text = JSON.stringify(data.layout);
    if (data.layout && (other || this.layoutText !== text)) {
      this.layoutText = text;
      this.store.setLayout(data.layout);
      this.setLayout(data.layout);
    }
    if (data.run && !this.painter.Plotly) {
      loadPlotly(data.plotly).then(
        (plotly) => this.usePlotly(plotly),
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
    setAttribute(this.root, "data-ready", null);
    this.detail.plan();
  }

  configureParts() {}

  setLayout(layout) {
    this.board.set(layout);
  }

  refused(sentence) {
    this.setTrouble(sentence);
  }

  usePlotly(plotly) {
    this.painter.usePlotly(plotly);
  }

  // Of a run that cannot be read, the list of runs and the run are requested in turn.
  address() {
    const { store } = this;
    this.asksForRuns = !store.run || (Boolean(store.unreadable) && !this.asksForRuns);
    if (this.asksForRuns) return "/api/runs";
    return `/api/series?${new URLSearchParams(store.question())}`;
  }

  take(answer) {
    if (answer.series) this.takeSeries(answer);
    this.reportStale(answer.page_token);
  }

  takeSeries(answer) {
    const { store } = this;
    store.unreadable = null;
    const [before, { axis, afresh }, first] = [store.extent(), store, !store.answer];
    const fresh = store.take(answer);
    if (first) this.detail.plan(); // a zoom from before a reload
    this.show(answer, fresh, first);
    this.polls += 1;
    setAttribute(this.root, "data-polls", this.polls);
    this.detail.follow();
    if (store.axis !== axis)
      this.moved(); // the first step was recorded
    else if (afresh) this.redraw();
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
