// The view: one per mounted component, from mount to unmount.

const PACE_MS = 500;
const PENDING_PACE_MS = 80;
const PENDING_MAX_MS = 5_000;
const ENDED_PACE_MS = 2_000;
const REDRAW_MAX_MS = 2_000; // long runs: redraw at least this often, else when a pixel came
const DRAW_SHARE = 0.15; // of the main thread, at most, for redraws that no one asked for
const MIN_SPAN = { step: 2, time: 0.05 };

class LiveView {
  constructor(parent) {
    this.parent = parent;
    this.live = {};
    this.events = [];
    this.cards = [];
    this.polls = 0;
    this.frame = 0;
    this.rest = 0;
    this.restUntil = 0;
    this.urgent = 0;
    this.hoverX = null;
    this.header = new Header();
    this.table = new EventTable();
    this.build();
    this.watch();
  }

  build() {
    const axis = (name, label) => el("button", { type: "button", "data-axis": name, onclick: () => this.setAxis(name) }, label);
    this.axisButtons = [axis("step", "Step"), axis("time", "Time")];
    const toLive = { type: "button", class: "ss-back", "data-testid": "back-to-live", hidden: "", onclick: () => this.reset() };
    this.back = el("button", toLive, "Back to live");
    const hint = el("span", { class: "ss-muted ss-hint" }, "Drag to zoom, shift-drag to pan, double-click to reset");
    const controls = el(
      "div", { class: "ss-bar" },
      el("div", { class: "ss-switch", role: "group", "aria-label": "Horizontal axis", "data-testid": "axis-switch" }, ...this.axisButtons),
      this.back, hint,
    );
    this.grid = el("div", { class: "ss-grid" });
    const parts = [this.header.node, controls, this.grid, this.table.node];
    this.root = el("div", { class: "ss-root", "data-testid": "stepscope-live", "data-polls": 0 }, ...parts);
    this.parent.append(this.root);
  }

  watch() {
    this.seen = new IntersectionObserver((entries) => {
      for (const entry of entries) {
        const card = this.cards.find((candidate) => candidate.node === entry.target);
        if (card) card.visible = entry.isIntersecting;
      }
      this.schedule();
    }, { rootMargin: "120px" });
    this.sized = new ResizeObserver((entries) => {
      for (const entry of entries) {
        const card = this.cards.find((candidate) => candidate.stage === entry.target);
        const width = Math.floor(entry.contentRect.width);
        if (!card || !width || width === card.width) continue;
        card.width = width;
        this.redraw(card);
      }
    });
    // A redraw in the middle of a drag would take the zoom box away.
    this.grid.addEventListener("pointerdown", () => (this.dragging = true));
    this.onUp = () => {
      if (!this.dragging) return;
      this.dragging = false;
      setTimeout(() => this.schedule(), 0);
    };
    window.addEventListener("pointerup", this.onUp);
    window.addEventListener("pointercancel", this.onUp);
    const trouble = (sentence) => this.header.setTrouble(sentence);
    this.detail = new Detail(this, () => this.redrawAll(), trouble);
    this.poller = new Poller({
      url: () => `/api/series?${new URLSearchParams({ run: this.run, since: cursorText(this.live), events: this.lastEvent })}`,
      pace: () => this.pace(),
      take: (answer) => this.take(answer),
      trouble,
    });
  }

  // --- configuration from Python ---

  configure(data, setTriggerValue) {
    this.setTriggerValue = setTriggerValue;
    this.data = data;
    this.theme = readTheme(this.root);
    const text = JSON.stringify(data.layout);
    const other = this.run !== data.run;
    if (other) this.openRun(data.run);
    if (other || this.layoutText !== text) this.setLayout(data.layout, text);
    if (!this.Plotly) {
      loadPlotly(data.plotly).then((plotly) => {
        this.Plotly = plotly;
        this.schedule();
      }, (error) => this.header.setTrouble(error.message));
    }
    if (data.pending_command !== this.pending) this.expect(data.pending_command);
    this.redrawAll();
    if (other) this.poller.restart();
    else this.poller.now();
  }

  openRun(run) {
    this.run = run;
    this.live = {};
    this.events = [];
    this.lastEvent = 0;
    this.answer = null;
    this.marks = [];
    this.pending = null;
    this.layoutText = null;
    this.prefs = { axis: "step", zoom: null, log: false, smoothing: 0.6, hidden: [], ...this.stored() };
    this.table.clear();
    this.header.setAck("");
    setAttribute(this.root, "data-ready", null);
    this.detail.plan();
  }

  setLayout(layout, text) {
    this.layoutText = text;
    this.metrics = layout.metrics;
    this.fit = layout.fit;
    this.header.configure(layout.kpis);
    this.closeCards();
    this.cards = layout.charts.map((spec) => (spec.kind === "fit" ? new FitCard(spec, this) : new Card(spec, this)));
    this.grid.replaceChildren(...this.cards.map((card) => card.node));
    for (const card of this.cards) {
      this.seen.observe(card.node);
      this.sized.observe(card.stage);
    }
    if (this.answer) this.header.update(this.answer, this.live);
  }

  stored() {
    try {
      return JSON.parse(sessionStorage.getItem(`stepscope:${this.run}`)) || {};
    } catch {
      return {}; // storage blocked or foreign content: start with defaults
    }
  }

  save() {
    try {
      sessionStorage.setItem(`stepscope:${this.run}`, JSON.stringify(this.prefs));
    } catch {
      // storage blocked or full: the choice lasts until the page is reloaded
    }
  }

  // --- answers ---

  pace() {
    if (this.pending !== null && performance.now() - this.pendingSince < PENDING_MAX_MS) return PENDING_PACE_MS;
    return this.answer && ENDED.has(this.answer.status) ? ENDED_PACE_MS : PACE_MS;
  }

  expect(command) {
    this.pending = command ?? null;
    if (this.pending === null) return;
    this.pendingSince = performance.now();
    const done = this.events.findLast((event) => commandOf(event) === command);
    if (done) this.acknowledge(done);
    else this.header.setAck("Sent. Waiting for the training loop to reach the end of its step…", "waiting");
  }

  acknowledge(event) {
    if (commandOf(event) === this.pending) this.pendingSince = -PENDING_MAX_MS;
    this.header.setAck(ackText(event), event.data?.ok === false ? "refused" : "done");
  }

  take(answer) {
    const before = this.extent();
    for (const [name, part] of Object.entries(answer.series)) {
      this.live[name] = mergeSeries(this.live[name], part);
    }
    if (!this.answer) this.detail.plan(); // a zoom kept from before a reload
    this.answer = answer;
    const marked = this.takeEvents(answer.events || []);
    this.header.update(answer, this.live);
    this.tellStatus(answer.status);
    this.polls += 1;
    setAttribute(this.root, "data-polls", this.polls);
    setAttribute(this.root, "data-status", answer.status);
    this.markStale(before, marked, new Set(Object.keys(answer.series)));
  }

  takeEvents(events) {
    const fresh = events.filter((event) => event.id > this.lastEvent);
    if (!fresh.length) return false;
    this.lastEvent = fresh[fresh.length - 1].id;
    this.events.push(...fresh);
    if (this.events.length > MAX_EVENTS) this.events.splice(0, this.events.length - MAX_EVENTS);
    this.table.add(fresh, this.metrics, this.events.length);
    const answered = fresh.findLast((event) => commandOf(event) !== null);
    if (answered) this.acknowledge(answered);
    return true;
  }

  // Once per status: the script then reruns with the new one and enables the right buttons.
  tellStatus(status) {
    if (!this.data.status || status === this.data.status || status === this.told) return;
    this.told = status;
    this.setTriggerValue("status", status);
  }

  // Which charts the answer made stale. In a long run one poll moves the lines by less than a pixel;
  // redrawing then costs as much as ever and shows nothing.
  markStale(before, marked, changed) {
    const after = this.extent();
    const grown = before === null || ((after[1] - before[1]) / (after[1] - after[0] || 1)) * 500;
    this.grown = before === null ? Infinity : (this.grown || 0) + grown;
    const now = performance.now();
    const zoomed = this.zoom() !== null;
    if (zoomed) this.detail.follow(after[1], now);
    for (const card of this.cards) {
      const fit = card instanceof FitCard;
      if (zoomed && !fit && !marked && card.drawnAt) continue;
      const touched = card.spec.traces.some((trace) => changed.has(trace.series)) || this.grown > 0;
      const due = marked || this.grown >= 1 || now - card.drawnAt > REDRAW_MAX_MS;
      if (touched && due) card.dirty = true;
    }
    if (this.grown >= 1) this.grown = 0;
    this.schedule();
  }

  // --- the x axis ---

  get axis() {
    return this.prefs.axis;
  }

  zoom() {
    return this.prefs.zoom;
  }

  // [first, last] x over all series, null before any.
  extent() {
    let [low, high] = [Infinity, -Infinity];
    // What is sampled before a resumed run's first step carries step 0.
    const bySteps = this.axis === "step" && this.live.steps?.t.length > 0;
    for (const series of bySteps ? [this.live.steps] : Object.values(this.live)) {
      const xs = xsOf(series, this.axis);
      if (!xs.length) continue;
      low = Math.min(low, xs[0]);
      high = Math.max(high, xs[xs.length - 1]);
    }
    return low <= high ? [low, high] : null;
  }

  liveRange() {
    const [low, high] = this.extent() || [0, 1];
    const from = this.axis === "time" ? Math.min(0, low) : low;
    return [from, Math.max(high, from + MIN_SPAN[this.axis])];
  }

  get range() {
    return this.zoom() || this.liveRange();
  }

  setAxis(name) {
    if (name === this.axis) return;
    const series = this.live.samples || this.live.steps;
    this.prefs.axis = name;
    this.hoverX = null;
    const zoom = this.zoom();
    if (zoom) this.prefs.zoom = this.widen(zoom.map((x) => convertX(series, name, x)));
    this.zoomChanged();
  }

  widen([from, to]) {
    const missing = Math.max(0, MIN_SPAN[this.axis] - (to - from)) / 2;
    return [from - missing, to + missing];
  }

  zoomTo(range) {
    const zoom = this.zoom();
    if (zoom && zoom[0] === range[0] && zoom[1] === range[1]) return;
    this.prefs.zoom = this.widen(range);
    this.zoomChanged();
  }

  reset() {
    if (!this.zoom()) return;
    this.prefs.zoom = null;
    this.zoomChanged();
  }

  zoomChanged() {
    this.save();
    this.detail.plan();
    this.redrawAll();
  }

  // What a chart draws: the zoom's detail where there is some, else all that is held.
  source(name) {
    return this.detail.of(name) || this.live[name];
  }

  // --- drawing ---

  redraw(card) {
    card.dirty = true;
    this.hurry();
  }

  // The reader changed something: all that is stale now is drawn without rests.
  hurry() {
    this.urgent = this.cards.filter((card) => card.dirty).length;
    this.restUntil = 0;
    clearTimeout(this.rest);
    this.rest = 0;
    this.schedule();
  }

  redrawAll() {
    for (const card of this.cards) card.dirty = true;
    for (const button of this.axisButtons) setAttribute(button, "aria-pressed", button.dataset.axis === this.axis);
    this.back.hidden = !this.zoom();
    setAttribute(this.root, "data-zoom", this.zoom() ? this.zoom().join() : null);
    this.hurry();
  }

  schedule() {
    if (this.frame || this.rest || this.closed) return;
    const wait = this.restUntil - performance.now();
    if (wait > 0) {
      this.rest = setTimeout(() => {
        this.rest = 0;
        this.schedule();
      }, wait);
    } else this.frame = requestAnimationFrame(() => this.drawOne());
  }

  // One chart a frame, the longest waiting first, then a rest in proportion to what it cost: a slow
  // computer draws less often and stays responsive.
  drawOne() {
    this.frame = 0;
    if (!this.Plotly || !this.answer || this.dragging || this.closed) return;
    const waiting = this.cards.filter((card) => card.dirty && card.visible && card.width > 0);
    if (waiting.length) {
      const card = waiting.reduce((oldest, each) => (each.drawnAt < oldest.drawnAt ? each : oldest));
      this.marks = marksIn(this.events, this.axis, this.range);
      const began = performance.now();
      const hurry = !card.plotted || this.urgent > 0;
      card.draw();
      const ended = performance.now();
      this.urgent = Math.max(0, this.urgent - 1);
      this.restUntil = hurry ? 0 : ended + (ended - began) * (1 / DRAW_SHARE - 1);
    }
    if (waiting.length > 1) this.schedule();
    if (waiting.every((card) => card.plotted)) setAttribute(this.root, "data-ready", 1);
  }

  hover(x, card) {
    this.hoverX = x;
    this.hoverCard = card;
    this.hoverFrame ??= requestAnimationFrame(() => {
      this.hoverFrame = null;
      for (const each of this.cards) if (each.visible && each.plotted) each.hoverAt(this.hoverX, each === this.hoverCard);
    });
  }

  // --- the end ---

  closeCards() {
    for (const card of this.cards) card.close();
    this.seen.disconnect();
    this.sized.disconnect();
    this.cards = [];
  }

  close() {
    this.closed = true;
    this.poller.close();
    this.detail.close();
    clearTimeout(this.rest);
    cancelAnimationFrame(this.frame);
    if (this.hoverFrame) cancelAnimationFrame(this.hoverFrame);
    this.closeCards();
    window.removeEventListener("pointerup", this.onUp);
    window.removeEventListener("pointercancel", this.onUp);
    this.root.remove();
  }
}

// Streamlit calls this again on the same parent when `data` or the theme changes.
const views = (globalThis.stepscopeViews ??= new WeakMap());

export default function stepscopeLive({ data, parentElement, setTriggerValue }) {
  let view = views.get(parentElement);
  if (!view) views.set(parentElement, (view = new LiveView(parentElement)));
  view.configure(data, setTriggerValue);
  return () => {
    view.close();
    views.delete(parentElement);
  };
}
