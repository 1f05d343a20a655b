// The memory ledger of a run on the Memory tab: the stack over the whole run, and its table.

import { AxisBar } from "./axisbar.js";
import { Board } from "./chart_grid.js";
import { Detail } from "./zoom_detail.js";
import { el, setAttribute, setText } from "./dom.js";
import { clock } from "./format.js";
import { LedgerTable, momentAt } from "./ledger_table.js";
import { mounting } from "./mount.js";
import { Painter } from "./painter.js";
import { loadPlotly } from "./plotly.js";
import { Poller } from "./poll.js";
import { Store } from "./store.js";
import { readTheme } from "./theme.js";

const PACE_MS = 1_000;
const ENDED_PACE_MS = 3_000;
const TELL_AGAIN_MS = 5_000;

class LedgerView {
  constructor(parent) {
    this.polls = 0;
    this.store = new Store(
      () => this.moved(),
      () => {},
      "ledger",
    );
    this.bar = new AxisBar(this.store);
    this.table = new LedgerTable((trace) => this.pick(trace));
    this.notes = el("div", { class: "ss-ledger-notes", "data-testid": "ledger-notes" });
    this.trouble = el("p", { class: "ss-trouble", hidden: "" });
    this.painter = new Painter(
      this.store,
      () => this.board.cards,
      () => setAttribute(this.root, "data-ready", 1),
    );
    const hover = this.painter.hover.bind(this.painter);
    this.painter.hover = (x, card) => {
      hover(x, card);
      this.showTable();
    };
    this.board = new Board(this.painter, el("span"), () => {});
    this.painter.restWhileDragging(this.board.node);
    const trouble = (sentence) => this.setTrouble(sentence);
    this.detail = new Detail(this.store, () => this.redraw(), trouble);
    this.poller = new Poller({
      url: () => this.address(),
      pace: () => (this.store.ended ? ENDED_PACE_MS : PACE_MS),
      take: (answer) => this.take(answer),
      refused: trouble,
      trouble,
    });
    const sides = el("div", { class: "ss-ledger-sides" }, this.board.node, this.table.node);
    this.body = el("div", { class: "ss-body" }, this.bar.node, sides, this.notes);
    this.root = el(
      "div",
      { class: "ss-root ss-ledger", "data-testid": "stepscope-ledger", "data-polls": 0 },
      this.trouble,
      this.body,
    );
    parent.append(this.root);
  }

  configure(data, setTriggerValue) {
    Object.assign(this, { data, setTriggerValue });
    this.painter.useTheme(readTheme(this.root));
    const other = this.store.run !== data.run;
    if (other) this.openRun(data.run);
    this.body.hidden = !data.run;
    const text = JSON.stringify(data.layout);
    if (data.layout && (other || this.layoutText !== text)) {
      this.layoutText = text;
      this.store.setLayout(data.layout);
      this.board.set(data.layout);
    }
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
    setAttribute(this.root, "data-ready", null);
    this.detail.plan();
  }

  address() {
    const { store } = this;
    return store.run ? `/api/series?${new URLSearchParams(store.question())}` : "/api/runs";
  }

  take(answer) {
    if (answer.series) this.takeMoments(answer);
    this.tellStale(answer.page_token);
  }

  takeMoments(answer) {
    const { store } = this;
    const [before, { axis, afresh }] = [store.extent(), store];
    const fresh = store.take(answer);
    this.polls += 1;
    setAttribute(this.root, "data-polls", this.polls);
    this.showTable();
    this.detail.follow();
    // With the first step of a run the axis may turn to steps.
    if (afresh || before === null || store.axis !== axis) this.redraw();
    else this.painter.markStale(before, fresh.length > 0, new Set(Object.keys(answer.series)));
  }

  showTable() {
    const { store, painter } = this;
    const [card] = this.board.cards;
    const { ledger } = store.answer || {};
    this.table.node.hidden = !ledger;
    if (!ledger || !card) return;
    const at = painter.hoverX;
    const title = at === null ? (store.ended ? "At the end" : "Now") : `At ${clock(at)}`;
    const moment = at === null ? ledger.now : momentAt(store.source("ledger"), store.axis, at);
    const hidden = (trace) => card.hidden(trace);
    const { sums } = store.layout;
    const parts = { traces: card.spec.traces, sums, hidden };
    this.table.update(parts, title, moment, ledger.peaks);
    const text = ledger.notes.join("\n");
    if (this.noted === text) return;
    this.noted = text;
    this.notes.replaceChildren(...ledger.notes.map((note) => el("p", { class: "ss-muted" }, note)));
  }

  pick(trace) {
    this.board.cards[0].pick(trace);
    this.showTable();
  }

  setTrouble(sentence) {
    this.trouble.hidden = !sentence;
    setText(this.trouble, sentence || "");
  }

  // The page around the ledger is of before: it runs again.
  tellStale(token) {
    const now = performance.now();
    const again = token === this.told && now - this.toldAt < TELL_AGAIN_MS;
    if (token === this.data.page_token || again) return;
    [this.told, this.toldAt] = [token, now];
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

export const stepscopeLedger = mounting("stepscopeLedgers", LedgerView);
