// The GPUs tab: a strip for the machine, a card a GPU, and below the card that is open its
// history and details. It asks once a second and changes only the text and widths that are new.

import { DeviceCard, Meter } from "./device_card.js";
import { DeviceDetails } from "./device_details.js";
import { el, setAttribute, setText } from "./dom.js";
import { mounting } from "./mount.js";
import { Poller } from "./poll.js";
import { readTheme } from "./theme.js";

const PACE_MS = 1_000;

class DevicesView {
  constructor(parent) {
    this.open = null;
    this.cards = new Map();
    this.polls = 0;
    this.trouble = el("p", { class: "ss-trouble", role: "status", hidden: "" });
    this.host = new HostStrip();
    this.none = new NoGpu();
    this.summary = el("p", { class: "ss-muted dv-summary", hidden: "" });
    this.grid = el("div", { class: "dv-grid", "data-testid": "gpus" });
    this.details = new DeviceDetails(() => this.show(null));
    this.root = el(
      "div",
      { class: "ss-root dv-root", "data-testid": "devices", "data-polls": 0 },
      this.trouble,
      this.host.node,
      this.none.node,
      this.summary,
      this.grid,
    );
    this.root.addEventListener("keydown", (event) => {
      if (event.key === "Escape" && this.open) this.show(null);
    });
    parent.append(this.root);
    this.poller = new Poller({
      url: () => this.address(),
      pace: () => PACE_MS,
      take: (answer) => this.take(answer),
      refused: () => this.show(null), // the open GPU is gone
      trouble: (sentence) => this.setTrouble("connection", sentence),
    });
    this.troubles = { connection: null, driver: null };
  }

  configure({ first }) {
    readTheme(this.root);
    if (first && !this.answer) this.take(first);
    this.poller.now();
  }

  address() {
    if (!this.open) return "/api/devices";
    return `/api/devices?${new URLSearchParams({ gpu: this.open, since: this.details.last })}`;
  }

  take(answer) {
    this.answer = answer;
    this.setTrouble("driver", answer.trouble);
    const { machine, gpu } = answer;
    if (machine) this.showMachine(machine);
    if (gpu && gpu.uuid === this.open) this.showDetails(gpu, answer.now);
    this.polls += 1;
    setAttribute(this.root, "data-polls", this.polls);
  }

  showDetails(gpu, now) {
    const first = !this.details.last;
    this.details.update(gpu, now);
    if (first) this.details.node.scrollIntoView({ block: "nearest" });
  }

  showMachine({ host, none, summary, cards }) {
    this.host.update(host);
    this.none.update(none);
    setText(this.summary, summary);
    this.summary.hidden = !summary;
    const known = [...this.cards.keys()].join();
    if (known !== cards.map(({ uuid }) => uuid).join()) this.layCards(cards);
    for (const card of cards) this.cards.get(card.uuid).update(card);
  }

  layCards(cards) {
    const before = this.cards;
    this.cards = new Map(
      cards.map(({ uuid }) => [
        uuid,
        before.get(uuid) ?? new DeviceCard(() => this.show(this.open === uuid ? null : uuid)),
      ]),
    );
    this.grid.replaceChildren(...[...this.cards.values()].map(({ node }) => node));
    if (!this.cards.has(this.open)) this.open = null;
    this.placeDetails();
  }

  // Opens a GPU's details, or closes them; who pressed keeps the focus.
  show(uuid) {
    const before = this.cards.get(this.open);
    this.open = uuid;
    this.details.clear();
    this.placeDetails();
    if (!uuid) before?.focus();
    this.poller.restart();
  }

  placeDetails() {
    for (const [uuid, card] of this.cards) card.mark(uuid === this.open);
    if (!this.open) {
      this.details.node.remove();
      return;
    }
    this.cards.get(this.open).node.after(this.details.node);
  }

  setTrouble(source, sentence) {
    this.troubles[source] = sentence;
    const text = this.troubles.connection || this.troubles.driver;
    setText(this.trouble, text || "");
    this.trouble.hidden = !text;
  }

  close() {
    this.poller.close();
    this.root.remove();
  }
}

class HostStrip {
  constructor() {
    this.name = el("h3", { class: "dv-host-name" });
    this.cpu = new Meter("CPU", "blue");
    this.memory = new Meter("Memory", "green");
    this.facts = el("dl", { class: "dv-host-facts" });
    this.node = el(
      "section",
      { class: "dv-host", "data-testid": "host", "aria-label": "This machine", hidden: "" },
      el("div", { class: "dv-host-load" }, this.name, this.cpu.node, this.memory.node),
      this.facts,
    );
  }

  update({ name, cpu, memory, facts }) {
    this.node.hidden = false;
    setText(this.name, name);
    this.cpu.update(cpu);
    this.memory.update(memory);
    const text = JSON.stringify(facts);
    if (text === this.text) return;
    this.text = text;
    this.facts.replaceChildren(
      ...facts.map(([label, value]) => el("div", {}, el("dt", {}, label), el("dd", {}, value))),
    );
  }
}

// Why there is no GPU to show, and what to do.
class NoGpu {
  constructor() {
    this.reason = el("p", { class: "dv-none-reason" });
    this.next = el("p", { class: "ss-muted" });
    this.node = el(
      "section",
      { class: "dv-none", "data-testid": "no-gpu", hidden: "" },
      el("h3", {}, "No GPU found"),
      this.reason,
      this.next,
    );
  }

  update(none) {
    this.node.hidden = !none;
    if (!none) return;
    setText(this.reason, none.reason);
    setText(this.next, none.next);
  }
}

export const stepscopeDevices = mounting("stepscopeDevices", DevicesView);
