// The GPUs tab: a strip for the machine, a card a GPU, and below the card that is open its
// history and details. It asks once a second and changes only the text and widths that are new.

import { DeviceDetails, levelIcon } from "./device_details.js";
import { el, mounting, parts, say, setAttribute, setText } from "./dom.js";
import { Poller } from "./poll.js";
import { readTheme } from "./theme.js";

const PACE_MS = 1_000;

class DevicesView {
  constructor(parent) {
    this.open = null;
    this.cards = new Map();
    this.polls = 0;
    const view = parts(`<div class="ss-root dv-root" data-testid="devices" data-polls="0">
      <p class="ss-trouble" role="status" hidden ref="trouble"></p>
      <section class="dv-box dv-host" data-testid="host" aria-label="This machine" hidden ref="host">
        <div class="dv-host-load" ref="load"><h3 class="ss-cut" ref="name"></h3></div>
        <dl class="dv-host-facts" ref="facts"></dl>
      </section>
      <section class="dv-box dv-none" data-testid="no-gpu" hidden ref="none">
        <h3>No GPU found</h3><p ref="reason"></p><p class="ss-muted" ref="next"></p>
      </section>
      <p class="ss-muted dv-summary" hidden ref="summary"></p>
      <div class="dv-grid" data-testid="gpus" ref="grid"></div>
    </div>`);
    Object.assign(this, view, { root: view.node });
    [this.cpu, this.memory] = [new Meter("CPU", "blue"), new Meter("Memory", "green")];
    this.load.append(this.cpu.node, this.memory.node);
    this.details = new DeviceDetails(() => this.show(null));
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

  configure({ first, plotly }) {
    this.details.use(readTheme(this.root), plotly);
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
    this.host.hidden = false;
    setText(this.name, host.name);
    this.cpu.update(host.cpu);
    this.memory.update(host.memory);
    const text = JSON.stringify(host.facts);
    if (text !== this.factsText) {
      this.factsText = text;
      const fact = ([label, value]) => el("div", {}, el("dt", {}, label), el("dd", {}, value));
      this.facts.replaceChildren(...host.facts.map(fact));
    }
    this.none.hidden = !none;
    setText(this.reason, none?.reason ?? "");
    setText(this.next, none?.next ?? "");
    say(this.summary, summary);
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
    if (!uuid) before?.button.focus();
    this.poller.restart();
  }

  placeDetails() {
    for (const [uuid, card] of this.cards) card.mark(uuid === this.open);
    if (this.open) this.cards.get(this.open).node.after(this.details.node);
    else this.details.node.remove();
  }

  setTrouble(source, sentence) {
    this.troubles[source] = sentence;
    say(this.trouble, this.troubles.connection || this.troubles.driver);
  }

  close() {
    this.poller.close();
    this.details.clear();
    this.root.remove();
  }
}

// A share as a bar between its name and its words; without a share the words alone.
class Meter {
  constructor(label, color) {
    const meter = parts(`<div class="dv-meter">
      <span class="ss-cut" ref="name"></span>
      <span class="dv-bar" aria-hidden="true" ref="bar"><i ref="fill"></i></span>
      <span class="ss-cut" ref="text"></span>
    </div>`);
    Object.assign(this, meter);
    setText(this.name, label);
    this.fill.style.background = `var(--ss-${color})`;
  }

  update({ share, text }) {
    const known = typeof share === "number";
    this.bar.hidden = !known;
    if (known) this.fill.style.width = `${Math.max(0, Math.min(100, share))}%`;
    setText(this.text, text);
    setAttribute(this.node, "title", known ? null : text);
  }
}

// One GPU, whose title opens its details.
class DeviceCard {
  constructor(press) {
    const card = parts(`<article class="dv-box dv-card">
      <div class="dv-head">
        <h3><button type="button" class="dv-open" ref="button"></button></h3>
        <span class="ss-muted dv-cuda" ref="cuda"></span><span class="ss-cut" ref="name"></span>
        <span class="ss-muted" ref="short"></span>
      </div>
      <p class="dv-health"><span ref="sign"></span><span class="dv-health-text" ref="health"></span>
      </p>
      <div ref="meters"></div>
      <p class="ss-cut" ref="line"></p>
      <p class="ss-cut ss-muted" ref="who"></p>
      <div class="dv-instances" ref="instances"></div>
    </article>`);
    Object.assign(this, card);
    this.button.addEventListener("click", press);
    this.utilization = new Meter("Utilization", "green");
    this.memory = new Meter("Memory", "green");
    this.meters.replaceWith(this.utilization.node, this.memory.node);
  }

  update(card) {
    setAttribute(this.node, "data-testid", `gpu-${card.uuid}`);
    setAttribute(this.node, "data-level", card.level);
    setText(this.button, card.title);
    const { cuda, name, short, health, who } = card;
    for (const [part, text] of Object.entries({ cuda, name, short, health, who })) {
      setText(this[part], text ?? "");
      setAttribute(this[part], "title", part === "short" ? card.uuid : (text ?? null));
    }
    if (this.level !== card.level) this.sign.replaceChildren(levelIcon(card.level));
    this.level = card.level;
    this.utilization.update(card.utilization);
    this.memory.update(card.memory);
    setText(this.line, card.line.join(" · "));
    this.updateInstances(card.instances);
  }

  updateInstances(instances) {
    const text = instances.map(({ uuid, profile }) => `${uuid} ${profile}`).join();
    if (text !== this.instanceText) {
      this.instanceText = text;
      this.parts = instances.map(({ profile }) => new Meter(profile, "green"));
      this.instances.replaceChildren(...this.parts.map(({ node }) => node));
    }
    instances.forEach(({ memory }, at) => this.parts[at].update(memory));
  }

  mark(open) {
    setAttribute(this.button, "aria-expanded", open);
    setAttribute(this.node, "data-open", open ? 1 : null);
  }
}

export const stepscopeDevices = mounting("stepscopeDevices", DevicesView);
