// A profile: the parts of a step as bars, and its stacks as a flame graph on a canvas, the callers
// above what they call. Only what is wider than a pixel is drawn, so size costs nothing.

import { el, setAttribute, setText } from "./dom.js";
import { percent, withUnit } from "./format.js";
import { mounting } from "./mount.js";
import { ask } from "./poll.js";
import { readTheme, withAlpha } from "./theme.js";

const ROW = 20;
const MIN_WIDTH = 1;
const MAX_ROWS = 150;
const NONE = -1;
const KINDS = [
  { name: "Python", color: "blue", holds: () => true },
  { name: "module", color: "green", holds: (name) => name.startsWith("nn.Module: ") },
  { name: "built-in function", color: "gray", holds: (name) => name.startsWith("<built-in") },
  {
    name: "operator",
    color: "orange",
    holds: (name) => !/\.py\(\d+\): /.test(name) && /^[\w.]+(::|Backward\d|$)/.test(name),
  },
];

export function kindOf(name) {
  return Math.max(...KINDS.map(({ holds }, kind) => (holds(name) ? kind : 0)));
}

// Where each node lies: begin and end in microseconds, depth, and its children, largest first.
export function place({ parent, total_us: total }) {
  const count = parent.length;
  const children = new Map([[NONE, []]]);
  for (let node = 0; node < count; node++) {
    if (!children.has(parent[node])) children.set(parent[node], []);
    children.get(parent[node]).push(node);
  }
  for (const list of children.values()) list.sort((a, b) => total[b] - total[a]);
  const [begin, end] = [new Float64Array(count), new Float64Array(count)];
  const depth = new Int32Array(count);
  const whole = children.get(NONE).reduce((sum, node) => sum + total[node], 0);
  const lay = (node, from, until) => {
    let at = from;
    for (const child of children.get(node) || []) {
      begin[child] = Math.min(at, until);
      at += total[child];
      end[child] = Math.min(at, until);
      depth[child] = node === NONE ? 0 : depth[node] + 1;
    }
  };
  lay(NONE, 0, whole);
  for (let node = 0; node < count; node++) lay(node, begin[node], end[node]); // callers come first
  return { begin, end, depth, children, whole, base: baseOf(children, total, whole) };
}

// The rows at the top that need not be drawn: one function each that holds nearly all, such as
// those which start a script. The last two of them stay.
function baseOf(children, total, whole) {
  let [node, rows] = [NONE, 0];
  while (children.get(node)?.length && total[children.get(node)[0]] >= 0.97 * whole) {
    node = children.get(node)[0];
    rows += 1;
  }
  return Math.max(0, rows - 2);
}

// The boxes [node, left, width, row] that are seen while `zoom` (NONE: all) fills the width.
export function boxes({ begin, end, depth, children, whole, base }, parent, zoom, width) {
  const [from, until] = zoom === NONE ? [0, whole] : [begin[zoom], end[zoom]];
  const scale = width / Math.max(until - from, 1e-9);
  const found = [];
  for (let node = zoom; node !== NONE; node = parent[node])
    found.push([node, 0, width, depth[node] - base]);
  const open = [zoom];
  while (open.length) {
    for (const node of children.get(open.pop()) || []) {
      const size = (end[node] - begin[node]) * scale;
      const row = depth[node] - base;
      if (size < MIN_WIDTH || row >= MAX_ROWS) continue;
      found.push([node, (begin[node] - from) * scale, size, row]);
      open.push(node);
    }
  }
  return found.filter(([, , , row]) => row >= 0);
}

// The node that an arrow key leads to.
export function neighbor({ children, depth, base }, parent, node, key) {
  if (node === NONE) {
    node = children.get(NONE)[0] ?? NONE;
    while (node !== NONE && depth[node] < base) node = children.get(node)[0];
    return node;
  }
  if (key === "ArrowUp") return depth[node] > base ? parent[node] : node;
  if (key === "ArrowDown") return children.get(node)?.[0] ?? node;
  const beside = children.get(parent[node]);
  return beside[beside.indexOf(node) + (key === "ArrowRight" ? 1 : -1)] ?? node;
}

class ProfileView {
  constructor(parent) {
    this.abort = new AbortController();
    this.bars = el("div", { class: "ss-profile-bars" });
    this.text = el("p", { class: "ss-flame-text", "data-testid": "flame-text" });
    this.spoken = el("p", { class: "ss-spoken", "aria-live": "polite" });
    this.reset = el("button", { type: "button", class: "ss-button" }, "Whole profile");
    this.canvas = el("canvas", {
      tabindex: 0,
      role: "application",
      "aria-roledescription": "flame graph",
      "aria-label":
        "Profile flame graph. Arrow keys move, Enter zooms into a function, Escape resets." +
        "Escape shows all again.",
    });
    this.box = el("div", { class: "ss-flame-box" }, this.canvas);
    this.legend = el("div", { class: "ss-flame-legend", "aria-hidden": "true" });
    this.head = el("div", { class: "ss-flame-head" }, this.legend, this.reset);
    this.stacks = el("div", {}, this.head, this.box, this.text, this.spoken);
    this.root = el(
      "div",
      { class: "ss-root ss-profile", "data-testid": "profile" },
      this.bars,
      this.stacks,
    );
    this.stacks.hidden = true;
    this.listen();
    parent.append(this.root);
    this.observer = new ResizeObserver(() => this.draw());
    this.observer.observe(this.box);
  }

  listen() {
    this.reset.addEventListener("click", () => this.zoomTo(NONE));
    this.canvas.addEventListener("mousemove", (event) => this.point(this.nodeAt(event)));
    this.canvas.addEventListener("mouseleave", () => this.point(this.selected));
    this.canvas.addEventListener("click", (event) => {
      const node = this.nodeAt(event);
      if (node === NONE) return;
      this.selected = node;
      this.zoomTo(node);
    });
    this.canvas.addEventListener("keydown", (event) => this.press(event));
    this.canvas.addEventListener("focus", () => {
      if (this.flame && this.selected === NONE) this.select(neighbor(this.placed, [], NONE));
    });
  }

  configure({ run, first, last, rank }) {
    this.theme = readTheme(this.root);
    this.ink = getComputedStyle(this.root).color;
    const address = `/api/profile?${new URLSearchParams({ run, first, last, rank })}`;
    if (address === this.address) this.draw();
    else this.load(address);
  }

  async load(address) {
    this.address = address;
    setText(this.bars, "Reading the profile…");
    try {
      const answer = await ask(address, this.abort.signal);
      if (address === this.address) this.show(answer);
    } catch (error) {
      if (!this.abort.signal.aborted) setText(this.bars, error.message);
    }
  }

  show({ bars, flame, steps }) {
    this.steps = steps;
    this.bars.replaceChildren(...bars.map((bar) => this.bar(bar)));
    this.flame = flame;
    this.placed = place(flame);
    this.kinds = flame.names.map(kindOf);
    this.zoom = this.selected = this.pointed = NONE;
    this.stacks.hidden = !flame.parent.length;
    this.draw();
    setAttribute(this.root, "data-nodes", flame.parent.length);
  }

  bar({ label, parts }) {
    const shares = parts.map(({ color, share }) =>
      el("span", { style: `width:${100 * share}%;background:var(--ss-${color})` }),
    );
    const words = parts
      .filter(({ share }) => share > 0)
      .map(({ name, color, share, seconds }) =>
        el(
          "span",
          {},
          el("i", { style: `background:var(--ss-${color})`, "aria-hidden": "true" }),
          `${name} ${percent(100 * share)} · ${withUnit(seconds, "s")}`,
        ),
      );
    const title = el("h3", {}, `${label}, by part of a step`);
    const strip = el("div", { class: "ss-profile-bar", "aria-hidden": "true" }, ...shares);
    return el("div", {}, title, strip, el("div", { class: "ss-profile-parts" }, ...words));
  }

  // --- drawing ---

  draw() {
    if (!this.flame || this.stacks.hidden) return;
    const width = Math.floor(this.box.clientWidth);
    if (width < 10) return;
    const { parent } = this.flame;
    this.shown = boxes(this.placed, parent, this.zoom, width);
    const rows = 1 + this.shown.reduce((most, [, , , row]) => Math.max(most, row), 0);
    const ratio = Math.min(2, globalThis.devicePixelRatio || 1);
    Object.assign(this.canvas, { width: width * ratio, height: rows * ROW * ratio });
    Object.assign(this.canvas.style, { width: `${width}px`, height: `${rows * ROW}px` });
    const pen = this.canvas.getContext("2d");
    pen.scale(ratio, ratio);
    pen.font = `11.5px ${this.theme.font}`;
    pen.textBaseline = "middle";
    for (const box of this.shown) this.drawBox(pen, box);
    this.drawLegend();
    this.reset.disabled = this.zoom === NONE;
    setAttribute(this.root, "data-zoom", this.zoom);
    this.tell();
  }

  drawBox(pen, [node, left, width, row]) {
    const { palette } = this.theme;
    const name = this.flame.names[this.flame.name[node]];
    const { color } = KINDS[this.kinds[this.flame.name[node]]];
    const above = this.zoom !== NONE && row < this.placed.depth[this.zoom] - this.placed.base;
    pen.fillStyle = withAlpha(palette[color], above ? 0.14 : 0.32);
    pen.fillRect(left, row * ROW, Math.max(MIN_WIDTH, width - 1), ROW - 1);
    if (node === this.pointed || node === this.selected) {
      pen.strokeStyle = this.ink;
      pen.strokeRect(left + 0.5, row * ROW + 0.5, Math.max(1, width - 2), ROW - 2);
    }
    if (width < 24) return;
    pen.save();
    pen.beginPath();
    pen.rect(left, row * ROW, width - 4, ROW);
    pen.clip();
    pen.fillStyle = this.ink;
    pen.fillText(name.replace("nn.Module: ", ""), left + 4, row * ROW + ROW / 2);
    pen.restore();
  }

  drawLegend() {
    const items = KINDS.map(({ name, color }) =>
      el(
        "span",
        {},
        el("i", { style: `background:${withAlpha(this.theme.palette[color], 0.5)}` }),
        name,
      ),
    );
    this.legend.replaceChildren(...items);
  }

  // --- what is pointed at, and selected by keys ---

  nodeAt({ offsetX: x, offsetY: y }) {
    const row = Math.floor(y / ROW);
    const hit = this.shown?.find(
      ([, left, width, at]) => at === row && x >= left && x < left + width,
    );
    return hit ? hit[0] : NONE;
  }

  point(node) {
    if (node === this.pointed) return;
    this.pointed = node;
    this.draw();
  }

  select(node) {
    this.selected = this.pointed = node;
    this.draw();
    setText(this.spoken, this.words(node));
    const top = (this.placed.depth[node] - this.placed.base) * ROW;
    if (top < this.box.scrollTop || top + ROW > this.box.scrollTop + this.box.clientHeight)
      this.box.scrollTop = top - this.box.clientHeight / 2;
  }

  zoomTo(node) {
    [this.zoom, this.pointed] = [node, NONE]; // what lies under the pointer now is another
    if (node === NONE) this.selected = NONE;
    this.draw();
  }

  press(event) {
    if (!this.flame) return;
    if (event.key.startsWith("Arrow"))
      this.select(neighbor(this.placed, this.flame.parent, this.selected, event.key));
    else if (event.key === "Enter" || event.key === " ") this.zoomTo(this.selected);
    else if (event.key === "Escape") this.zoomTo(NONE);
    else return;
    event.preventDefault();
  }

  words(node) {
    if (node === NONE) return "";
    const { names, name, total_us: total, calls } = this.flame;
    const share = percent((100 * total[node]) / (this.placed.whole || 1));
    const times = calls[node] === 1 ? "1 call" : `${calls[node].toLocaleString("en-US")} calls`;
    return `${names[name[node]]}: ${withUnit(total[node] / 1e6, "s")} (${share}) in ${times}`;
  }

  tell() {
    const left = this.flame.left_out;
    const more = left ? ` ${left.toLocaleString("en-US")} smaller functions are left out.` : "";
    const { base } = this.placed;
    const outer = base
      ? ` ${base} outer functions, which hold nearly all of it, are not drawn.`
      : "";
    const hint = `A click on a function fills the width with it.${outer}${more}`;
    setText(this.text, this.words(this.pointed === NONE ? this.selected : this.pointed) || hint);
  }

  close() {
    this.abort.abort();
    this.observer.disconnect();
    this.root.remove();
  }
}

export const stepscopeFlame = mounting("stepscopeProfiles", ProfileView);
