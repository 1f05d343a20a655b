// The line between numbers and charts: step or time, the way back from a zoom, how to zoom.

import { el, setAttribute } from "./dom.js";

export class AxisBar {
  constructor(store) {
    this.store = store;
    const axis = (name, label) =>
      el(
        "button",
        { type: "button", "data-axis": name, onclick: () => store.chooseAxis(name) },
        label,
      );
    this.buttons = [axis("step", "Step"), axis("time", "Time")];
    this.switch = el(
      "div",
      {
        class: "ss-switch",
        role: "group",
        "aria-label": "Horizontal axis",
        "data-testid": "axis-switch",
      },
      ...this.buttons,
    );
    const back = {
      type: "button",
      class: "ss-back",
      "data-testid": "back-to-live",
      hidden: "",
      onclick: () => store.zoomTo(null),
    };
    this.back = el("button", back, "Back to live");
    const hint = "Drag to zoom, shift-drag to pan, double-click to reset";
    this.node = el(
      "div",
      { class: "ss-bar" },
      this.switch,
      this.back,
      el("span", { class: "ss-muted ss-hint" }, hint),
    );
  }

  update() {
    const { axis, stepped, zoom, onlyTime } = this.store;
    this.switch.hidden = onlyTime;
    for (const button of this.buttons) {
      setAttribute(button, "aria-pressed", button.dataset.axis === axis);
      button.disabled = button.dataset.axis === "step" && !stepped;
    }
    this.back.hidden = !zoom;
  }
}
