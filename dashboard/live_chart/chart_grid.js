// The charts of a run in three groups (main, custom metrics, collapsed), and the bar above them.

import { Card } from "./card.js";
import { button, parts, render, setChildren, setText, showText } from "./dom.js";
import { recorded } from "./series.js";

export class Board {
  constructor(scene, unfolded) {
    this.scene = scene;
    this.cards = [];
    const board = parts(`<div>
      <div class="ss-grid" ref="mainGrid"></div>
      <section class="ss-group ss-section" data-testid="custom" aria-label="Custom metrics" hidden ref="custom">
        <h3>Custom metrics</h3>
        <div class="ss-grid" ref="customGrid"></div>
        <p class="ss-muted" hidden ref="note"></p>
      </section>
      <details class="ss-group ss-section" data-testid="more" hidden ref="more">
        <summary><strong>More charts</strong> <span class="ss-muted"
          ref="summary"></span></summary>
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

  // Sets the charts. A card with the same description stays, also its drag: a metric may appear later.
  set(layout) {
    const before = new Map(this.cards.map((card) => [card.described, card]));
    this.cards = layout.charts.map((spec) => {
      const described = JSON.stringify(spec);
      const kept = before.get(described);
      before.delete(described);
      return kept || this.make(spec, described);
    });
    for (const card of before.values()) this.drop(card);
    for (const [group, grid] of Object.entries(this.grids)) {
      const nodes = this.cards.filter((card) => card.spec.group === group).map(({ node }) => node);
      setChildren(grid, nodes);
    }
    this.custom.hidden = !this.customGrid.childElementCount;
    this.more.hidden = !this.moreGrid.childElementCount;
    showText(this.note, layout.custom_note);
  }

  card(id) {
    return this.cards.find(({ spec }) => spec.id === id);
  }

  make(spec, described) {
    const card = new Card(spec, this.scene);
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

  // Hides charts of which no metric was ever recorded. Lists the collapsed charts.
  refresh({ live }) {
    const present = ({ optional, series, metric }) =>
      !optional || recorded(live[series]?.v[metric]) || live[series]?.last?.[metric] !== undefined;
    for (const card of this.cards) {
      const { traces } = card.spec;
      card.known ||= traces.some(present);
      card.node.hidden = !card.known;
    }
    const folded = this.cards.filter(({ spec, known }) => known && spec.group === "more");
    setText(this.summary, folded.map(({ spec }) => spec.title).join("  ·  "));
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

// The bar above the charts: steps or time, "Back to live" while zoomed.
export class AxisBar {
  constructor(store) {
    this.store = store;
    const bar = parts(`<div class="ss-row ss-bar">
      <div class="ss-switch" role="group" aria-label="Horizontal axis" data-testid="axis-switch"
        ref="axes"></div>
      <button type="button" class="ss-button" data-testid="back-to-live" hidden ref="back">
        Back to live</button>
    </div>`);
    Object.assign(this, bar);
    this.back.onclick = () => store.zoomTo(null);
  }

  update() {
    const { axis, stepped, zoom } = this.store;
    const choice = (name, label, disabled) => {
      const attributes = { "aria-pressed": axis === name, disabled };
      return button(() => this.store.chooseAxis(name), attributes, label);
    };
    render(this.axes, choice("step", "Step", stepped ? null : ""), choice("time", "Time", null));
    this.back.hidden = !zoom;
  }
}
