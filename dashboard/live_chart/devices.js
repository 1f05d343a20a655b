// The GPUs tab: the machine, a card per GPU, and below the open card the history and details of its GPU.

import { DeviceDetails, levelIcon } from "./device_details.js";
import { button, el, morph, mounting, parts, render, setAttribute, setChildren } from "./dom.js";
import { setText, showText } from "./dom.js";
import { isNumber } from "./format.js";
import { Poller } from "./poll.js";
import { readTheme } from "./theme.js";

const PACE_MS = 1_000;

// A share of 0 to 100 as a bar between its name and its text; without a share the text alone.
function meter(label, color, { share, text }) {
  const known = isNumber(share);
  const width = Math.max(0, Math.min(100, share ?? 0));
  const fill = el("i", { style: `width:${width}%;background:var(--ss-${color})` });
  return el(
    "div",
    { class: "dv-meter", title: known ? null : text },
    el("span", { class: "ss-cut" }, label),
    el("span", { class: "dv-bar", "aria-hidden": "true", hidden: known ? null : "" }, fill),
    el("span", { class: "ss-cut" }, text),
  );
}

function deviceCard(gpu, open, press) {
  const { uuid, level, title, cuda, name, short, health, who, line, instances } = gpu;
  const text = (kind, words, help = words) => el("span", { class: kind, title: help }, words ?? "");
  return el(
    "article",
    {
      class: "ss-box dv-card",
      "data-testid": `gpu-${uuid}`,
      "data-level": level,
      "data-open": open ? 1 : null,
    },
    el(
      "div",
      { class: "dv-head" },
      el("h3", {}, button(press, { class: "dv-open", "aria-expanded": String(open) }, title)),
      text("ss-muted dv-cuda", cuda),
      text("ss-cut", name),
      text("ss-muted", short, uuid),
    ),
    el("p", { class: "dv-health" }, levelIcon(level), text(null, health)),
    meter("Utilization", "green", gpu.utilization),
    meter("Memory", "green", gpu.memory),
    el("p", { class: "ss-cut" }, line.join(" · ")),
    el("p", { class: "ss-cut ss-muted", title: who }, who ?? ""),
    ...instances.map(({ profile, memory }) => meter(profile, "green", memory)),
  );
}

class DevicesView {
  constructor(parent) {
    this.open = null; // UUID of the open GPU
    this.cards = new Map();
    this.troubles = { connection: null, driver: null };
    this.polls = 0;
    const view = parts(`<div class="ss-root dv-root" data-testid="devices" data-polls="0">
      <p class="ss-warning" role="status" hidden ref="trouble"></p>
      <section class="ss-box ss-row dv-host" data-testid="host" aria-label="This machine" hidden ref="host">
        <div class="dv-load" ref="load"></div><dl class="ss-row dv-facts" ref="facts"></dl>
      </section>
      <section class="ss-box ss-note ss-section" data-testid="no-gpu" hidden ref="none">
        <h3>No GPU found</h3><p ref="reason"></p><p class="ss-muted" ref="next"></p>
      </section>
      <p class="ss-muted ss-note" hidden ref="summary"></p>
      <div class="dv-grid" data-testid="gpus" ref="grid"></div>
    </div>`);
    Object.assign(this, view, { root: view.node });
    this.details = new DeviceDetails(() => this.show(null));
    this.root.addEventListener("keydown", (event) => {
      if (event.key === "Escape" && this.open) this.show(null);
    });
    parent.append(this.root);
    this.poller = new Poller({
      url: () => this.address(),
      pace: () => PACE_MS,
      take: (answer) => this.take(answer),
      refused: () => this.show(null), // the open GPU was removed
      trouble: (sentence) => this.setTrouble("connection", sentence),
    });
  }

  configure({ first, plotly }) {
    Object.assign(this.details, { theme: readTheme(this.root), plotly });
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
    render(
      this.load,
      el("h3", { class: "ss-cut" }, host.name),
      meter("CPU", "blue", host.cpu),
      meter("Memory", "green", host.memory),
    );
    const fact = ([label, value]) => el("div", {}, el("dt", {}, label), el("dd", {}, value));
    render(this.facts, ...host.facts.map(fact));
    this.none.hidden = !none;
    setText(this.reason, none?.reason ?? "");
    setText(this.next, none?.next ?? "");
    showText(this.summary, summary);
    this.showCards(cards);
  }

  showCards(cards) {
    const before = this.cards;
    this.cards = new Map(cards.map(({ uuid }) => [uuid, before.get(uuid) ?? el("article")]));
    if (!this.cards.has(this.open)) this.open = null;
    const nodes = cards.flatMap((gpu) => {
      const [node, open] = [this.cards.get(gpu.uuid), gpu.uuid === this.open];
      morph(
        node,
        deviceCard(gpu, open, () => this.show(open ? null : gpu.uuid)),
      );
      return open ? [node, this.details.node] : [node];
    });
    setChildren(this.grid, nodes);
  }

  // Opens the details of a GPU; null closes them and returns the focus to the card.
  show(uuid) {
    const before = this.cards.get(this.open);
    this.open = uuid;
    this.details.clear();
    this.showCards(this.answer.machine.cards);
    if (!uuid) before?.querySelector("button").focus();
    this.poller.restart();
  }

  setTrouble(source, sentence) {
    this.troubles[source] = sentence;
    showText(this.trouble, this.troubles.connection || this.troubles.driver);
  }

  close() {
    this.poller.close();
    this.details.clear();
    this.root.remove();
  }
}

export const stepscopeDevices = mounting("stepscopeDevices", DevicesView);
