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
const steps = (label, value, button) => ({
  input: { type: "number", "aria-label": label, min: 1, max: 50, step: 1, value, required: "" },
  before: "Next steps",
  button,
  args: (typed) => ({ steps: Number(typed) }),
});
const text = { type: "text", maxlength: TEXT_LENGTH, placeholder: "Describe the event" };
const BOXES = {
  mark: {
    ...{ input: { ...text, "aria-label": "Event text" }, before: "", button: "Add annotation" },
    args: (typed) => ({ text: typed }),
  },
  profile: steps("Steps to profile", 5, "Start profile"),
  memory_snapshot: steps("Steps to record", 1, "Record allocations"),
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
