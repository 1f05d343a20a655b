// Command buttons of a run and their popovers. The run's answer arrives later, as an event.

import { button, el, setAttribute, setChildren } from "./dom.js";
import { ask } from "./poll.js";

const MAX_TEXT_CHARACTERS = 200;

// Sends a command to the run. Throws an Error with a sentence for the user.
export function sendCommand(run, id, name, args) {
  return ask("/api/command", null, {
    method: "POST",
    headers: { "Content-Type": "application/json", "X-Stepscope": "1" },
    body: JSON.stringify({ run, id, name, args }),
  });
}

// Microseconds since 1970, like the server's own ids: they rise with time.
export const newCommandId = () => Math.round((performance.timeOrigin + performance.now()) * 1000);

// Returns {refused, title} of a button: the reason if it is disabled. Returns null if it is hidden.
export function buttonState({ help, when }, status) {
  if (!(status in when)) return null;
  const refused = when[status];
  return { refused, title: refused ? `${help} Not now: ${refused}` : help };
}

export class Button {
  constructor(label, press) {
    const pressed = () => this.refused === null && press();
    this.node = this.part = button(pressed, { class: "ss-button" }, label);
    this.refused = null;
  }

  // Shows a state of `buttonState`. A disabled button can be focused and names its reason.
  show(state, waiting) {
    const { refused = null, title = null } = state ?? {};
    this.refused = refused;
    this.node.hidden = !state;
    setAttribute(this.node, "title", title);
    setAttribute(this.node, "aria-disabled", refused === null ? null : "true");
    setAttribute(this.node, "aria-busy", waiting ? "true" : null);
  }
}

const steps = (label, value, submit) => ({
  input: { type: "number", "aria-label": label, min: 1, max: 50, step: 1, value, required: "" },
  before: "Next steps",
  submit,
  args: (typed) => ({ steps: Number(typed) }),
});
const BOXES = {
  mark: {
    input: {
      type: "text",
      maxlength: MAX_TEXT_CHARACTERS,
      placeholder: "Describe the event",
      "aria-label": "Event text",
    },
    before: "",
    submit: "Add annotation",
    args: (typed) => ({ text: typed }),
  },
  profile: steps("Steps to profile", 5, "Start profile"),
  memory_snapshot: steps("Steps to record", 1, "Record allocations"),
};

// A button that opens a popover with an input; Enter sends the command.
class BoxButton extends Button {
  constructor(label, { input, before, submit, args }, send) {
    super(label, () => {});
    const field = el("input", { class: "ss-field", ...input, autofocus: "" });
    const onsubmit = (event) => {
      event.preventDefault();
      send(args(field.value));
      field.value = input.value ?? "";
      this.box.hidePopover();
    };
    const form = el(
      "form",
      { class: "ss-row", onsubmit },
      before,
      field,
      el("button", { class: "ss-button" }, submit),
    );
    const onbeforetoggle = () => this.place();
    this.box = el("div", { class: "ss-popover ss-float", popover: "auto", onbeforetoggle }, form);
    this.part = el("span", { class: "ss-contents" }, this.node, this.box);
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

// The buttons of the memory chart (`memory` is true), or all others.
export class ButtonGroup {
  // `send(spec, args)` is called for a press.
  constructor(memory, send, label) {
    Object.assign(this, { memory, send, made: [] });
    this.node = el("div", { class: "ss-buttons", role: "group", "aria-label": label });
  }

  configure(specs) {
    const before = new Map(this.made.map(({ spec, button }) => [spec.name, button]));
    this.made = specs
      .filter((spec) => spec.memory === this.memory)
      .map((spec) => ({ spec, button: before.get(spec.name) ?? this.make(spec) }));
    setChildren(
      this.node,
      this.made.map(({ button }) => button.part),
    );
  }

  make(spec) {
    const send = (args = {}) => this.send(spec, args);
    const box = BOXES[spec.name];
    return box ? new BoxButton(spec.label, box, send) : new Button(spec.label, send);
  }

  update(status, waitingFor) {
    for (const { spec, button } of this.made)
      button.show(buttonState(spec, status), waitingFor === spec.name);
  }
}
