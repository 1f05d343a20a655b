// Alerts that were raised while the page is open, at most three at a time in a corner. One goes when
// it is dismissed, when its alert is over, or when newer ones need the place; none goes by itself.

import { parts, setAttribute, setText } from "./dom.js";

const MAX_TOASTS = 3;
const LEVEL_WORDS = { info: "Info", warning: "Warning", critical: "Critical" };

export const isAlert = (event) => event.kind === "alert";
export const levelWord = (event) => LEVEL_WORDS[event.data?.level] || "Warning";
export const isOver = (event) => event.data?.state === "cleared";

// Which alarm an alert is about: one rule has one for each rank, GPU and metric.
const alarmOf = ({ data = {} }) => [data.rank || 0, data.rule, data.uuid, data.metric].join("|");

// The alerts that were raised and not cleared since, oldest first.
export function activeAlerts(events) {
  const active = new Map();
  for (const event of events.filter(isAlert)) {
    active.delete(alarmOf(event));
    if (!isOver(event)) active.set(alarmOf(event), event);
  }
  return [...active.values()];
}

// The alerts to show in the corner after these new events, oldest first.
export function shownAfter(shown, fresh) {
  let left = shown;
  for (const event of fresh.filter(isAlert)) {
    left = left.filter((other) => alarmOf(other) !== alarmOf(event));
    if (!isOver(event)) left = [...left, event];
  }
  return left.slice(-MAX_TOASTS);
}

export class Toasts {
  constructor() {
    this.shown = []; // events, oldest first
    // A critical one interrupts what a screen reader says, another waits for its end.
    const toasts = parts(`<div class="ss-toasts" role="region" aria-label="Alerts"
      data-testid="toasts">
      <div aria-live="assertive" ref="assertive"></div><div aria-live="polite" ref="polite"></div>
    </div>`);
    Object.assign(this, toasts);
  }

  clear() {
    this.show([]);
  }

  take(fresh) {
    if (fresh.some(isAlert)) this.show(shownAfter(this.shown, fresh));
  }

  // What stays is left alone: a screen reader says only what is new.
  show(shown) {
    const gone = this.shown.filter((event) => !shown.includes(event));
    for (const event of gone) this.toastOf(event)?.remove();
    for (const event of shown.filter((event) => !this.shown.includes(event))) {
      const place = event.data?.level === "critical" ? this.assertive : this.polite;
      place.append(this.toast(event));
    }
    this.shown = shown;
  }

  toastOf(event) {
    return this.node.querySelector(`[data-alert="${CSS.escape(String(event.id))}"]`);
  }

  toast(event) {
    const word = levelWord(event);
    const toast = parts(`<div class="ss-toast"><strong ref="word"></strong><span ref="text"></span>
      <button type="button" class="ss-toast-close" ref="close">×</button></div>`);
    setAttribute(toast.node, "data-alert", event.id);
    setAttribute(toast.node, "data-level", event.data?.level ?? null);
    setText(toast.word, word);
    setText(toast.text, event.text || "");
    setAttribute(toast.close, "aria-label", `Dismiss: ${event.text || word}`);
    toast.close.addEventListener("click", () => this.dismiss(event));
    return toast.node;
  }

  // Who dismisses several by keyboard stays among them.
  dismiss(event) {
    const had = this.toastOf(event)?.contains(document.activeElement);
    this.show(this.shown.filter((other) => other !== event));
    if (had) this.node.querySelector(".ss-toast-close")?.focus();
  }
}
