// Toasts of the alerts that are raised while the page is open. A toast stays until it is dismissed,
// its alert is cleared, or newer alerts need the place.

import { button, el, parts } from "./dom.js";
import { alertKey, isAlert, isCleared, levelOf } from "./events.js";

const MAX_TOASTS = 3;

// Returns the alerts to show after these new events, oldest first.
export function shownAfter(shown, fresh) {
  let left = shown;
  for (const event of fresh.filter(isAlert)) {
    left = left.filter((other) => alertKey(other) !== alertKey(event));
    if (!isCleared(event)) left = [...left, event];
  }
  return left.slice(-MAX_TOASTS);
}

export class Toasts {
  constructor() {
    this.nodes = new Map(); // event -> toast, oldest first
    // A critical alert interrupts a screen reader, the others wait.
    const toasts = parts(`<div class="ss-toasts" role="region" aria-label="Alerts"
      data-testid="toasts">
      <div aria-live="assertive" ref="assertive"></div><div aria-live="polite" ref="polite"></div>
    </div>`);
    Object.assign(this, toasts);
  }

  take(fresh) {
    if (fresh.some(isAlert)) this.show(shownAfter([...this.nodes.keys()], fresh));
  }

  // Shows these alerts. A toast that stays is not touched: a screen reader reads new nodes only.
  show(events) {
    const before = this.nodes;
    this.nodes = new Map(events.map((event) => [event, before.get(event) ?? this.toast(event)]));
    for (const [event, node] of before) if (!this.nodes.has(event)) node.remove();
  }

  toast(event) {
    const { text = "", data } = event;
    const name = levelOf(event);
    const close = { class: "ss-button", "aria-label": `Dismiss: ${text || name}` };
    const node = el(
      "div",
      { class: "ss-toast ss-float ss-row", "data-alert": event.id, "data-level": data?.level },
      el("strong", {}, name),
      el("span", {}, text),
      button(() => this.dismiss(event), close, "×"),
    );
    (data?.level === "critical" ? this.assertive : this.polite).append(node);
    return node;
  }

  // The next toast has the focus after a toast is dismissed by keyboard.
  dismiss(event) {
    const focused = this.nodes.get(event).contains(document.activeElement);
    this.show([...this.nodes.keys()].filter((other) => other !== event));
    if (focused) this.node.querySelector("button")?.focus();
  }
}
