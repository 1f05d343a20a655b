// The buttons: drawn for what the run can be asked, in its status. A press is shown at once; the
// answer comes from the run.

import { el, setAttribute, setText } from "./dom.js";
import { ask } from "./poll.js";

const TEXT_LENGTH = 200;

// Sends a command to the run; throws an Error whose message is a sentence.
export function sendCommand(run, id, name, args) {
  return ask("/api/command", null, {
    method: "POST",
    headers: { "Content-Type": "application/json", "X-Stepscope": "1" },
    body: JSON.stringify({ run, id, name, args }),
  });
}

// Microseconds since 1970, as the server's own ids: they rise with time.
export const newCommandId = () => Math.round((performance.timeOrigin + performance.now()) * 1000);

// How a button is drawn: not at all (null), or with the reason why it cannot be pressed.
export function buttonState({ help, when }, status) {
  if (!(status in when)) return null;
  const refused = when[status];
  return { refused, title: refused ? `${help} Not now: ${refused}` : help };
}

// One that cannot be pressed keeps the focus and says why.
class Button {
  constructor(label, press, className = "") {
    this.node = el("button", { type: "button", class: `ss-button ${className}` }, label);
    this.refused = null;
    this.node.addEventListener("click", () => this.refused === null && press());
  }

  show({ refused, title }, waiting) {
    this.refused = refused;
    setAttribute(this.node, "title", title);
    setAttribute(this.node, "aria-disabled", refused === null ? null : "true");
    setAttribute(this.node, "aria-busy", waiting ? "true" : null);
    this.node.hidden = false;
  }

  hide() {
    this.node.hidden = true;
  }
}

// Mark, Profile and Memory snapshot open a small box for what they need to know; Enter sends it.
const BOXES = {
  mark: {
    input: {
      type: "text",
      "aria-label": "Event text",
      placeholder: "Describe the event",
      maxlength: TEXT_LENGTH,
    },
    before: "",
    button: "Add annotation",
    args: (value) => ({ text: value }),
  },
  profile: {
    input: {
      type: "number",
      "aria-label": "Steps to profile",
      min: 1,
      max: 50,
      step: 1,
      value: 5,
      required: "",
    },
    before: "Next steps",
    button: "Start profile",
    args: (value) => ({ steps: Number(value) }),
  },
  memory_snapshot: {
    input: {
      type: "number",
      "aria-label": "Steps to record",
      min: 1,
      max: 50,
      step: 1,
      value: 1,
      required: "",
    },
    before: "Next steps",
    button: "Record allocations",
    args: (value) => ({ steps: Number(value) }),
  },
};

class BoxButton extends Button {
  constructor(label, { input, before, button, args }, send) {
    super(label, () => {});
    const field = el("input", { ...input, autofocus: "" });
    const form = el("form", {}, before, field, el("button", { class: "ss-button" }, button));
    this.box = el("div", { class: "ss-popover", popover: "auto" }, form);
    form.addEventListener("submit", (event) => {
      event.preventDefault();
      send(args(field.value));
      field.value = input.value ?? "";
      this.box.hidePopover();
    });
    this.box.addEventListener("beforetoggle", () => this.place());
    this.part = el("span", { class: "ss-mark" }, this.node, this.box);
  }

  place() {
    const { left, bottom } = this.node.getBoundingClientRect();
    this.box.style.left = `min(${left}px, 100vw - 290px)`;
    this.box.style.top = `${bottom + 4}px`;
  }

  show(state, waiting) {
    super.show(state, waiting);
    this.node.popoverTargetElement = this.refused === null ? this.box : null;
  }
}

// A group of buttons, those beside the memory chart or the others.
export class ButtonGroup {
  // `send(spec, args)` is called for a press.
  constructor(memory, send, label) {
    Object.assign(this, { memory, send, made: [] });
    this.node = el("div", { class: "ss-buttons", role: "group", "aria-label": label });
  }

  // A button that is there already stays in the document: moving it would close its open box.
  configure(specs) {
    const before = new Map(this.made.map(({ spec, button }) => [spec.name, button]));
    this.made = specs
      .filter((spec) => spec.memory === this.memory)
      .map((spec) => ({ spec, button: before.get(spec.name) ?? this.make(spec) }));
    const parts = this.made.map(({ button }) => button.part || button.node);
    for (const part of [...this.node.children]) if (!parts.includes(part)) part.remove();
    parts.forEach((part, i) => {
      const there = this.node.children[i];
      if (there !== part) this.node.insertBefore(part, there ?? null);
    });
  }

  make(spec) {
    const send = (args = {}) => this.send(spec, args);
    const box = BOXES[spec.name];
    return box ? new BoxButton(spec.label, box, send) : new Button(spec.label, send);
  }

  update(status, waitingFor) {
    for (const { spec, button } of this.made) {
      const state = buttonState(spec, status);
      if (state) button.show(state, waitingFor === spec.name);
      else button.hide();
    }
  }
}

export class RetryButton extends Button {
  constructor(press) {
    super("Retry", press);
  }

  update({ label, help, refused }, starting) {
    setText(this.node, label);
    this.show({ refused, title: refused || help }, starting);
  }
}

// The tabs of a run. Python draws what lies below the component, so `open(name)` runs the script.
export class TabBar {
  constructor(open) {
    this.open = open;
    this.node = el("nav", { class: "ss-tabs", "aria-label": "Views of the run" });
    this.text = null;
  }

  // `tabs` is a list of [name, label]; empty without a run.
  update(tabs, shown) {
    const text = JSON.stringify(tabs);
    if (text !== this.text) {
      this.text = text;
      const button = ([name, label]) =>
        el("button", { type: "button", "data-tab": name, onclick: () => this.open(name) }, label);
      this.node.replaceChildren(...tabs.map(button));
    }
    for (const each of this.node.children)
      setAttribute(each, "aria-current", each.dataset.tab === shown ? "page" : null);
    this.node.hidden = !tabs.length;
  }
}

// The list of runs; a native one, so that it works by keyboard and on a phone.
export class RunPicker {
  // `pick(run id or "")` is called for a choice.
  constructor(pick) {
    this.node = el("select", {
      class: "ss-picker",
      "aria-label": "Run",
      title: "Shown run. Live runs first, then newest.",
      onchange: () => pick(this.node.value),
    });
    this.text = null;
  }

  update(runs, picked) {
    const text = JSON.stringify(runs);
    if (text !== this.text) {
      this.text = text;
      const option = ([id, label]) => el("option", { value: id }, label);
      this.node.replaceChildren(option(["", "No run selected"]), ...runs.map(option));
    }
    this.node.value = picked || "";
    this.node.hidden = !runs.length;
  }
}
