// The charts of a run in their groups: those always there, the script's own metrics (small), and
// those that are folded away (what only they show is fetched only while somebody looks).

import { Card } from "./card.js";
import { parts, say, setAttribute, setText } from "./dom.js";
import { FitCard } from "./linear_fit.js";
import { withUnit } from "./format.js";
import { HeatCard } from "./heat.js";
import { LedgerCard } from "./breakdown_card.js";
import { oddNow, recorded } from "./lines.js";
import { latestOf } from "./series.js";

// A learning rate or scale in a line of text: 0.001, 0.00003, 65536.
export const brief = (value) => String(Number(value.toPrecision(Math.abs(value) >= 1000 ? 7 : 4)));

const KINDS = { fit: FitCard, heat: HeatCard, ledger: LedgerCard };

// The newest value of each metric in a chart, of several GPUs their mean: "power 312 W".
export function newestWords(lines, live, metrics) {
  const keys = new Set(lines.filter(({ style }) => style !== "context").map((line) => line.metric));
  return [...keys].flatMap((key) => {
    const { label, unit } = metrics[key];
    const names = lines.filter((line) => line.metric === key).map((line) => line.series);
    const odd = oddNow(live[names[0]], key);
    const values = latestOf(live, names, key);
    if (odd !== null) return [`${label} ${odd}`];
    if (!values.length) return [];
    const mean = values.reduce((sum, value) => sum + value, 0) / values.length;
    return [`${label} ${unit ? withUnit(mean, unit) : brief(mean)}`];
  });
}

export class Board {
  // `unfolded(open)` is called when the folded charts are opened or closed.
  constructor(scene, unfolded) {
    this.scene = scene;
    this.cards = [];
    const board = parts(`<div>
      <div class="ss-grid ss-main" ref="mainGrid"></div>
      <section class="ss-group" data-testid="custom" aria-label="Custom metrics" hidden ref="custom">
        <h3>Custom metrics</h3>
        <div class="ss-grid ss-small" ref="customGrid"></div>
        <p class="ss-muted" hidden ref="note"></p>
      </section>
      <details class="ss-group ss-more" data-testid="more" hidden ref="more">
        <summary><span class="ss-more-title">More charts</span>
          <span class="ss-muted" ref="summary"></span></summary>
        <div class="ss-grid" ref="moreGrid"></div>
      </details>
    </div>`);
    Object.assign(this, board);
    this.grids = { main: this.mainGrid, custom: this.customGrid, more: this.moreGrid };
    this.more.addEventListener("toggle", () => unfolded(this.more.open));
    this.watch();
  }

  watch() {
    const find = (part, node) => this.cards.find((card) => card[part] === node);
    this.seen = new IntersectionObserver(
      (entries) => {
        for (const entry of entries) {
          const card = find("node", entry.target);
          if (card) card.visible = entry.isIntersecting;
        }
        this.scene.schedule();
      },
      { rootMargin: "120px" },
    );
    this.sized = new ResizeObserver((entries) => {
      for (const entry of entries) {
        const card = find("stage", entry.target);
        const width = Math.floor(entry.contentRect.width);
        if (!card || !width || width === card.width) continue;
        card.width = width;
        this.scene.redraw(card);
      }
    });
  }

  // Cards whose description stays are kept as they are, so that a metric which appears in the middle
  // of a run neither redraws the others nor takes a box away that somebody is dragging.
  set(layout) {
    const fit = JSON.stringify(layout.fit);
    const before = new Map(this.cards.map((card) => [card.described, card]));
    this.cards = layout.charts.map((spec) => {
      const described = JSON.stringify(spec) + (spec.kind === "fit" ? fit : "");
      const kept = before.get(described);
      before.delete(described);
      return kept || this.make(spec, described);
    });
    for (const card of before.values()) this.drop(card);
    for (const [group, grid] of Object.entries(this.grids)) {
      const nodes = this.cards.filter((card) => card.spec.group === group).map((card) => card.node);
      const same =
        nodes.length === grid.childElementCount &&
        nodes.every((node, i) => grid.children[i] === node);
      if (!same) grid.replaceChildren(...nodes);
    }
    this.custom.hidden = !this.grids.custom.childElementCount;
    say(this.note, layout.custom_note);
  }

  card(id) {
    return this.cards.find(({ spec }) => spec.id === id);
  }

  make(spec, described) {
    const card = new (KINDS[spec.kind] || Card)(spec, this.scene);
    card.described = described;
    this.seen.observe(card.node);
    this.sized.observe(card.stage);
    return card;
  }

  drop(card) {
    this.seen.unobserve(card.node);
    this.sized.unobserve(card.stage);
    card.close();
    card.node.remove();
  }

  // Hides charts of what the run does not record, and shows the newest values of those that are
  // folded away.
  refresh({ live, layout }) {
    const words = [];
    for (const { node, spec } of this.cards) {
      const lines = spec.traces;
      const absent = (line) => line.optional && !recorded(live[line.series]?.v[line.metric]);
      node.hidden = lines.length > 0 && lines.every(absent);
      if (spec.group === "more") words.push(...newestWords(lines, live, layout.metrics));
    }
    const main = this.cards.filter(({ node, spec }) => spec.group === "main" && !node.hidden);
    main.forEach(({ node }, i) =>
      node.classList.toggle("ss-wide", main.length % 2 === 1 && i === main.length - 1),
    );
    setText(this.summary, words.join("  ·  "));
    this.more.hidden = !this.grids.more.childElementCount;
  }

  clear() {
    for (const card of this.cards) this.drop(card);
    this.cards = [];
  }

  close() {
    this.clear();
    this.seen.disconnect();
    this.sized.disconnect();
  }
}

// The line above the charts: step or time, the way back from a zoom, how to zoom.
export class AxisBar {
  constructor(store) {
    this.store = store;
    const bar = parts(`<div class="ss-bar">
      <div class="ss-switch" role="group" aria-label="Horizontal axis" data-testid="axis-switch"
        ref="axes">
        <button type="button" data-axis="step">Step</button>
        <button type="button" data-axis="time">Time</button>
      </div>
      <button type="button" class="ss-back" data-testid="back-to-live" hidden ref="back">
        Back to live</button>
      <span class="ss-muted ss-hint">Drag to zoom, shift-drag to pan, double-click to reset</span>
    </div>`);
    Object.assign(this, bar);
    for (const button of this.axes.children)
      button.addEventListener("click", () => store.chooseAxis(button.dataset.axis));
    this.back.addEventListener("click", () => store.zoomTo(null));
  }

  update() {
    const { axis, stepped, zoom, onlyTime } = this.store;
    this.axes.hidden = onlyTime;
    for (const button of this.axes.children) {
      setAttribute(button, "aria-pressed", button.dataset.axis === axis);
      button.disabled = button.dataset.axis === "step" && !stepped;
    }
    this.back.hidden = !zoom;
  }
}
