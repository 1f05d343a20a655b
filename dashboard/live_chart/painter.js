// The schedule of redraws: one chart per frame, the one that waits longest first. The painter holds
// what all cards share: the store, the theme, Plotly, the marks of the range.

import { marksIn } from "./events.js";

const MAX_REDRAW_MS = 2_000; // between redraws of a long run, where a poll adds less than a pixel
const MAX_DRAW_SHARE = 0.15; // of the main thread, for redraws that the user did not cause
const PLOT_WIDTH_PX = 500; // about
const MAX_BUTTON_REST_MS = 1_000; // a pointer that stays on a button does not stop the charts

export class Painter {
  // `cards()` returns the cards; `ready()` is called once all visible cards are drawn.
  constructor(store, cards, ready) {
    Object.assign(this, { store, cards, ready, Plotly: null, theme: null, marks: [] });
    Object.assign(this, { frame: 0, rest: 0, restUntil: 0, dragging: false, closed: false });
    this.urgent = 0; // cards that a choice of the user changed
    this.grown = 0; // pixels by which the newest point has moved since the last redraw
    this.onUp = () => {
      if (!this.dragging) return;
      this.dragging = false;
      setTimeout(() => this.schedule(), 0);
    };
    for (const end of ["pointerup", "pointercancel"]) window.addEventListener(end, this.onUp);
    // A click during a redraw would be answered only after it (50 to 110 ms): none begins between the
    // arrival of the pointer on a button and the click, but those of first and of urgent drawings.
    this.onOver = (event) => {
      const { urgent } = this;
      const waits = ({ visible, plotted, dirty }) => visible && (!plotted || (dirty && urgent > 0));
      if (!this.cards().some(waits) && event.composedPath()[0].closest?.("button"))
        this.restUntil = Math.max(this.restUntil, performance.now() + MAX_BUTTON_REST_MS);
    };
    window.addEventListener("pointerover", this.onOver);
  }

  usePlotly(Plotly) {
    this.Plotly = Plotly;
    this.schedule();
  }

  // A redraw during a drag inside `node` would remove the zoom box.
  restWhileDragging(node) {
    node.addEventListener("pointerdown", () => (this.dragging = true));
  }

  redraw(card) {
    card.dirty = true;
    this.hurry();
  }

  redrawAll() {
    for (const card of this.cards()) card.dirty = true;
    this.hurry();
  }

  // Draws all stale cards without rests, after a choice of the user.
  hurry() {
    this.urgent = this.cards().filter((card) => card.dirty).length;
    this.restUntil = 0;
    clearTimeout(this.rest);
    this.rest = 0;
    this.schedule();
  }

  // Marks the charts that an answer made stale. `before` is the x extent before the answer, `marked` is
  // true if it had events, `changed` has the names of its series. In a long run one poll moves the
  // lines by less than a pixel; a redraw would cost the same and show nothing.
  markStale(before, marked, changed) {
    const after = this.store.extent();
    const span = after && (after[1] - after[0] || 1);
    this.grown += before && after ? ((after[1] - before[1]) / span) * PLOT_WIDTH_PX : Infinity;
    const now = performance.now();
    for (const card of this.cards()) {
      if (this.store.zoom && !marked && card.drawnAt) continue;
      const touched = this.grown > 0 || card.spec.traces.some(({ series }) => changed.has(series));
      const due = marked || this.grown >= 1 || now - card.drawnAt > MAX_REDRAW_MS;
      if (touched && due) card.dirty = true;
    }
    if (this.grown >= 1) this.grown = 0;
    this.schedule();
  }

  schedule() {
    if (this.frame || this.rest || this.closed) return;
    const wait = this.restUntil - performance.now();
    if (wait > 0) {
      this.rest = setTimeout(() => {
        this.rest = 0;
        this.schedule();
      }, wait);
    } else this.frame = requestAnimationFrame(() => this.drawOne());
  }

  // Draws one chart, then rests in proportion to its cost: a slow computer stays responsive.
  drawOne() {
    this.frame = 0;
    if (performance.now() < this.restUntil) {
      this.schedule();
      return;
    }
    const { store } = this;
    if (!this.Plotly || !store.answer || this.dragging || this.closed) return;
    const waiting = this.cards().filter((card) => card.dirty && card.visible && card.width > 0);
    if (waiting.length) {
      const [card] = waiting.toSorted((a, b) => a.drawnAt - b.drawnAt);
      this.marks = marksIn(store.events, store.axis, store.range);
      const began = performance.now();
      const hurry = !card.plotted || this.urgent > 0;
      card.draw();
      const ended = performance.now();
      this.urgent = Math.max(0, this.urgent - 1);
      this.restUntil = hurry ? 0 : ended + (ended - began) * (1 / MAX_DRAW_SHARE - 1);
    }
    if (waiting.length > 1) this.schedule();
    if (waiting.every((card) => card.plotted)) this.ready();
  }

  close() {
    this.closed = true;
    clearTimeout(this.rest);
    cancelAnimationFrame(this.frame);
    for (const end of ["pointerup", "pointercancel"]) window.removeEventListener(end, this.onUp);
    window.removeEventListener("pointerover", this.onOver);
  }
}
