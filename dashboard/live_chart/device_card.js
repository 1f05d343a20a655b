// One GPU as a card, whose title opens its details.

import { el, setAttribute, setText } from "./dom.js";

const LEVELS = {
  ok: { icon: "✓", word: "OK" },
  notice: { icon: "i", word: "Notice" },
  warning: { icon: "▲", word: "Warning" },
  critical: { icon: "✕", word: "Critical" },
};

// The sign of a level of health, told apart by its shape and its word as well as by its color.
export function levelIcon(level) {
  const { icon, word } = LEVELS[level];
  return el("span", { class: `dv-level dv-${level}`, role: "img", "aria-label": word }, icon);
}

// A share as a bar between its name and its words; without a share the words alone.
export class Meter {
  constructor(label, color) {
    this.fill = el("i", { style: `background:var(--ss-${color})` });
    this.text = el("span", { class: "dv-meter-text" });
    this.bar = el("span", { class: "dv-bar", "aria-hidden": "true" }, this.fill);
    const name = el("span", { class: "dv-meter-name" }, label);
    this.node = el("div", { class: "dv-meter" }, name, this.bar, this.text);
  }

  update({ share, text }) {
    const known = typeof share === "number";
    this.bar.hidden = !known;
    if (known) this.fill.style.width = `${Math.max(0, Math.min(100, share))}%`;
    setText(this.text, text);
    setAttribute(this.node, "title", known ? null : text);
  }
}

export class DeviceCard {
  constructor(press) {
    this.button = el("button", { type: "button", class: "dv-open", onclick: press });
    this.cuda = el("span", { class: "dv-cuda" });
    this.name = el("span", { class: "dv-name" });
    this.short = el("span", { class: "dv-short" });
    this.sign = el("span", { class: "dv-sign" });
    this.health = el("span", { class: "dv-health-text" });
    this.utilization = new Meter("Utilization", "green");
    this.memory = new Meter("Memory", "green");
    this.line = el("p", { class: "dv-line" });
    this.who = el("p", { class: "dv-who" });
    this.instances = el("div", { class: "dv-instances" });
    this.node = el(
      "article",
      { class: "dv-card" },
      el("div", { class: "dv-head" }, el("h3", {}, this.button), this.cuda, this.name, this.short),
      el("p", { class: "dv-health" }, this.sign, this.health),
      this.utilization.node,
      this.memory.node,
      this.line,
      this.who,
      this.instances,
    );
  }

  update(card) {
    setAttribute(this.node, "data-testid", `gpu-${card.uuid}`);
    setAttribute(this.node, "data-level", card.level);
    setText(this.button, card.title);
    setText(this.cuda, card.cuda ?? "");
    setText(this.name, card.name);
    setAttribute(this.name, "title", card.name);
    setText(this.short, card.short);
    setAttribute(this.short, "title", card.uuid);
    if (this.level !== card.level) this.sign.replaceChildren(levelIcon(card.level));
    this.level = card.level;
    setText(this.health, card.health);
    setAttribute(this.health, "title", card.health);
    this.utilization.update(card.utilization);
    this.memory.update(card.memory);
    setText(this.line, card.line.join(" · "));
    setText(this.who, card.who);
    setAttribute(this.who, "title", card.who);
    this.updateInstances(card.instances);
  }

  updateInstances(instances) {
    const text = instances.map(({ uuid, profile }) => `${uuid} ${profile}`).join();
    if (text !== this.instanceText) {
      this.instanceText = text;
      this.meters = instances.map(({ profile }) => new Meter(profile, "green"));
      this.instances.replaceChildren(...this.meters.map(({ node }) => node));
    }
    instances.forEach(({ memory }, at) => this.meters[at].update(memory));
  }

  mark(open) {
    setAttribute(this.button, "aria-expanded", open);
    setAttribute(this.node, "data-open", open ? 1 : null);
  }

  focus() {
    this.button.focus();
  }
}
