// When charts are drawn: one a frame, the longest waiting first. It holds what all cards share: the
// store, the theme, Plotly, the marks of the range and the crosshair.

import { FitCard } from "./linear_fit.js";
import { marksIn } from "./marks.js";

const REDRAW_MAX_MS = 2_000; // long runs: redraw at least this often, else when a pixel came
const DRAW_SHARE = 0.15; // of the main thread, at most, for redraws that no one asked for

export class Painter {
  // `cards()` gives the cards, `ready()` is called when all that are in view are drawn.
  constructor(store, cards, ready) {
    Object.assign(this, { store, cards, ready });
    this.Plotly = null;
    this.theme = null;
    this.marks = [];
    this.hoverX = null;
    this.hoverCard = null;
    this.hoverFrame = null;
    this.onHover = () => {};
    this.frame = 0;
    this.rest = 0;
    this.restUntil = 0;
    this.urgent = 0; // cards that the reader waits for
    this.grown = 0; // pixels by which the newest point has moved since the last redraw
    this.dragging = false;
    this.closed = false;
    this.onUp = () => {
      if (!this.dragging) return;
      this.dragging = false;
      setTimeout(() => this.schedule(), 0);
    };
    window.addEventListener("pointerup", this.onUp);
    window.addEventListener("pointercancel", this.onUp);
  }

  usePlotly(Plotly) {
    this.Plotly = Plotly;
    this.schedule();
  }

  useTheme(theme) {
    this.theme = theme;
  }

  // A redraw in the middle of a drag inside `node` would take the zoom box away.
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

  // The reader changed something: all that is stale now is drawn without rests.
  hurry() {
    this.urgent = this.cards().filter((card) => card.dirty).length;
    this.restUntil = 0;
    clearTimeout(this.rest);
    this.rest = 0;
    this.schedule();
  }

  // Which charts an answer made stale: `before` is the x extent before it, `marked` whether it had
  // events, `changed` the names of its series. In a long run one poll moves the lines by less than a
  // pixel; redrawing then costs as much as ever and shows nothing.
  markStale(before, marked, changed) {
    const after = this.store.extent();
    const grown =
      before && after ? ((after[1] - before[1]) / (after[1] - after[0] || 1)) * 500 : Infinity;
    this.grown += grown;
    const now = performance.now();
    const zoomed = this.store.zoom !== null;
    for (const card of this.cards()) {
      if (zoomed && !(card instanceof FitCard) && !marked && card.drawnAt) continue;
      const touched = card.spec.traces.some((trace) => changed.has(trace.series)) || this.grown > 0;
      const due = marked || this.grown >= 1 || now - card.drawnAt > REDRAW_MAX_MS;
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

  // Draws one chart, then rests in proportion to what it cost: a slow computer draws less often and
  // stays responsive.
  drawOne() {
    this.frame = 0;
    const { store } = this;
    if (!this.Plotly || !store.answer || this.dragging || this.closed) return;
    const waiting = this.cards().filter((card) => card.dirty && card.visible && card.width > 0);
    if (waiting.length) {
      const card = waiting.reduce((oldest, each) =>
        each.drawnAt < oldest.drawnAt ? each : oldest,
      );
      this.marks = marksIn(store.events, store.axis, store.range);
      const began = performance.now();
      const hurry = !card.plotted || this.urgent > 0;
      card.draw();
      const ended = performance.now();
      this.urgent = Math.max(0, this.urgent - 1);
      this.restUntil = hurry ? 0 : ended + (ended - began) * (1 / DRAW_SHARE - 1);
    }
    if (waiting.length > 1) this.schedule();
    if (waiting.every((card) => card.plotted)) this.ready();
  }

  // Puts the crosshair of all charts at x, null for none; `card` is the one under the pointer.
  hover(x, card) {
    this.hoverX = x;
    this.hoverCard = card;
    this.onHover();
    this.hoverFrame ??= requestAnimationFrame(() => {
      this.hoverFrame = null;
      for (const each of this.cards())
        if (each.visible && each.plotted) each.hoverAt(this.hoverX, each === this.hoverCard);
    });
  }

  close() {
    this.closed = true;
    clearTimeout(this.rest);
    cancelAnimationFrame(this.frame);
    if (this.hoverFrame) cancelAnimationFrame(this.hoverFrame);
    window.removeEventListener("pointerup", this.onUp);
    window.removeEventListener("pointercancel", this.onUp);
  }
}
