// The charts of a run in their groups: those always there, the script's own metrics (small), and
// what the optimizer does (folded away: its lines are fetched only while somebody looks).

import { Card } from "./card.js";
import { el, setText } from "./dom.js";
import { FitCard } from "./fit.js";
import { oddNow, recorded } from "./odd.js";
import { latest } from "./series.js";

// A learning rate or scale in a line of text: 0.001, 0.00003, 65536.
export const brief = (value) => String(Number(value.toPrecision(Math.abs(value) >= 1000 ? 7 : 4)));

export class Board {
  // `memoryButtons` is a node for the head of the memory chart; `unfolded(open)` is told when the
  // optimizer's charts are opened or closed.
  constructor(scene, memoryButtons, unfolded) {
    this.scene = scene;
    this.memoryButtons = memoryButtons;
    this.cards = [];
    this.grids = {
      main: el("div", { class: "ss-grid ss-main" }),
      custom: el("div", { class: "ss-grid ss-small" }),
      optimizer: el("div", { class: "ss-grid" }),
    };
    this.note = el("p", { class: "ss-muted", hidden: "" });
    this.custom = el(
      "section",
      {
        class: "ss-group",
        "data-testid": "custom",
        "aria-label": "Metrics of the script",
        hidden: "",
      },
      el("h3", {}, "Metrics of the script"),
      this.grids.custom,
      this.note,
    );
    this.summary = el("span", { class: "ss-muted" });
    this.more = el(
      "details",
      { class: "ss-group ss-more", "data-testid": "optimizer", hidden: "" },
      el("summary", {}, el("span", { class: "ss-more-title" }, "Optimizer"), this.summary),
      this.grids.optimizer,
    );
    this.more.addEventListener("toggle", () => unfolded(this.more.open));
    this.node = el("div", {}, this.grids.main, this.custom, this.more);
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
    this.cards.find((card) => card.spec.id === "memory")?.putInHead(this.memoryButtons);
    this.custom.hidden = !this.grids.custom.childElementCount;
    setText(this.note, layout.custom_note || "");
    this.note.hidden = !layout.custom_note;
  }

  make(spec, described) {
    const card = spec.kind === "fit" ? new FitCard(spec, this.scene) : new Card(spec, this.scene);
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

  // Shows of the optimizer what the run records, its newest values also while folded away.
  refresh(steps) {
    const words = [];
    let drawn = false;
    for (const card of this.cards) {
      if (card.spec.group !== "optimizer") continue;
      const lines = card.spec.traces;
      card.node.hidden = !lines.some((trace) => recorded(steps?.v[trace.metric]));
      drawn ||= !card.node.hidden;
      const value = latest(steps, lines[0].metric);
      const text = value === null ? oddNow(steps, lines[0].metric) : brief(value);
      const name = card.spec.title.toLowerCase().replace("amp", "AMP");
      if (text !== null) words.push(`${name} ${text}`);
    }
    setText(this.summary, words.join("  ·  "));
    this.more.hidden = !words.length && !drawn;
  }

  // Opens or closes the optimizer's charts.
  unfold(open) {
    this.more.open = open;
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
