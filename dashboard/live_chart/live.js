// The view: one per mounted component, from mount to unmount.

const PACE_MS = 500;
const PENDING_PACE_MS = 80;
const PENDING_MAX_MS = 5_000;
const ENDED_PACE_MS = 1_500;
const TELL_AGAIN_MS = 5_000;
const REDRAW_MAX_MS = 2_000; // long runs: redraw at least this often, else when a pixel came
const DRAW_SHARE = 0.15; // of the main thread, at most, for redraws that no one asked for

class LiveView {
  constructor(parent) {
    this.parent = parent;
    this.live = {};
    this.events = [];
    this.polls = 0;
    this.frame = 0;
    this.rest = 0;
    this.restUntil = 0;
    this.urgent = 0;
    this.hoverX = null;
    this.header = new Header();
    this.table = new EventTable();
    this.board = new Board(this, (open) => this.unfold(open));
    this.x = new XAxis(this, () => this.zoomChanged());
    this.build();
    this.watch();
  }

  build() {
    const axis = (name, label) =>
      el(
        "button",
        { type: "button", "data-axis": name, onclick: () => this.x.choose(name) },
        label,
      );
    this.axisButtons = [axis("step", "Step"), axis("time", "Time")];
    const toLive = {
      type: "button",
      class: "ss-back",
      "data-testid": "back-to-live",
      hidden: "",
      onclick: () => this.reset(),
    };
    this.back = el("button", toLive, "Back to live");
    const hint = el(
      "span",
      { class: "ss-muted ss-hint" },
      "Drag to zoom, shift-drag to pan, double-click to reset",
    );
    const controls = el(
      "div",
      { class: "ss-bar" },
      (this.switch = el(
        "div",
        {
          class: "ss-switch",
          role: "group",
          "aria-label": "Horizontal axis",
          "data-testid": "axis-switch",
        },
        ...this.axisButtons,
      )),
      this.back,
      hint,
    );
    const parts = [this.header.node, controls, this.board.node, this.table.node];
    this.root = el(
      "div",
      { class: "ss-root", "data-testid": "stepscope-live", "data-polls": 0 },
      ...parts,
    );
    this.parent.append(this.root);
  }

  watch() {
    // A redraw in the middle of a drag would take the zoom box away.
    this.board.node.addEventListener("pointerdown", () => (this.dragging = true));
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
      url: () => `/api/series?${new URLSearchParams(this.question())}`,
      pace: () => this.pace(),
      take: (answer) => this.take(answer),
      trouble,
    });
  }

  // `optimizer` asks for the optimizer's lines too: from the beginning when they have just been unfolded.
  question() {
    const since = this.afresh ? "" : cursorText(this.live);
    return { run: this.run, since, events: this.lastEvent, ...(this.asksMore ? { optimizer: 1 } : {}) };
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
      loadPlotly(data.plotly).then(
        (plotly) => {
          this.Plotly = plotly;
          this.schedule();
        },
        (error) => this.header.setTrouble(error.message),
      );
    }
    if (data.pending_command !== this.pending) this.expect(data.pending_command);
    this.redrawAll();
    if (other || this.afresh) this.poller.restart();
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
    this.prefs = {
      axis: "step",
      zoom: null,
      zoomAxis: null,
      log: false,
      smoothing: 0.6,
      hidden: [],
      more: false,
      ...this.stored(),
    };
    this.afresh = false;
    this.asksMore = this.prefs.more;
    this.board.more.open = this.prefs.more;
    this.board.clear();
    this.table.clear();
    this.header.setAck("");
    setAttribute(this.root, "data-ready", null);
    this.detail.plan();
  }

  setLayout(layout, text) {
    this.layoutText = text;
    this.metrics = layout.metrics;
    this.fit = layout.fit;
    this.x.only = layout.axis === "time" ? "time" : null;
    this.switch.hidden = this.x.only !== null;
    this.header.configure(layout);
    this.board.set(layout);
    if (!this.answer) return;
    this.afresh = true; // of a metric that is new here, earlier rows were not sent
    this.showAnswer(this.answer);
  }

  unfold(open) {
    if (open === this.asksMore) return; // it was us who opened it
    this.asksMore = this.prefs.more = open;
    this.save();
    if (!open) return;
    this.afresh = true;
    this.poller.restart();
    this.detail.plan();
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
    if (this.pending !== null && performance.now() - this.pendingSince < PENDING_MAX_MS)
      return PENDING_PACE_MS;
    return this.answer && ENDED.has(this.answer.status) ? ENDED_PACE_MS : PACE_MS;
  }

  expect(command) {
    this.pending = command ?? null;
    if (this.pending === null) return;
    this.pendingSince = performance.now();
    const done = this.events.findLast((event) => commandOf(event) === command);
    if (done) this.acknowledge(done);
    else this.header.setAck(this.data.layout.waiting, "waiting");
  }

  acknowledge(event) {
    if (commandOf(event) === this.pending) this.pendingSince = -PENDING_MAX_MS;
    this.header.setAck(ackText(event), event.data?.ok === false ? "refused" : "done");
  }

  take(answer) {
    const [before, axis] = [this.x.extent(), this.axis];
    this.afresh = false;
    for (const [name, part] of Object.entries(answer.series)) {
      this.live[name] = mergeSeries(this.live[name], part);
    }
    if (!this.answer) this.detail.plan(); // a zoom kept from before a reload
    this.answer = answer;
    const marked = this.takeEvents(answer.events || []);
    this.showAnswer(answer);
    this.tellStale(answer.page);
    this.polls += 1;
    setAttribute(this.root, "data-polls", this.polls);
    setAttribute(this.root, "data-status", answer.status);
    if (this.axis === axis) this.markStale(before, marked, new Set(Object.keys(answer.series)));
    else {
      this.hoverX = null;
      this.redrawAll(); // the first step has come
    }
  }

  showAnswer(answer) {
    this.header.update(answer, this.live);
    this.board.refresh(this.live.steps);
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

  // The page around the charts is of before: it runs again. Said once, and again should it not hear.
  tellStale(page) {
    const now = performance.now();
    if (page === this.data.page || (page === this.told && now - this.toldAt < TELL_AGAIN_MS))
      return;
    [this.told, this.toldAt] = [page, now];
    this.setTriggerValue("stale", page);
  }

  // Which charts the answer made stale. In a long run one poll moves the lines by less than a pixel;
  // redrawing then costs as much as ever and shows nothing.
  markStale(before, marked, changed) {
    const after = this.x.extent();
    const grown = before === null || ((after[1] - before[1]) / (after[1] - after[0] || 1)) * 500;
    this.grown = before === null ? Infinity : (this.grown || 0) + grown;
    const now = performance.now();
    const zoomed = this.zoom() !== null;
    if (zoomed) this.detail.follow(after[1], now);
    for (const card of this.board.cards) {
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
    return this.x.name;
  }

  get range() {
    return this.x.range;
  }

  zoom() {
    return this.x.zoom;
  }

  zoomTo(range) {
    const zoom = this.zoom();
    if (!zoom || zoom[0] !== range[0] || zoom[1] !== range[1]) this.x.zoom = range;
  }

  reset() {
    if (this.zoom()) this.x.zoom = null;
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
    this.urgent = this.board.cards.filter((card) => card.dirty).length;
    this.restUntil = 0;
    clearTimeout(this.rest);
    this.rest = 0;
    this.schedule();
  }

  redrawAll() {
    for (const card of this.board.cards) card.dirty = true;
    for (const button of this.axisButtons) {
      setAttribute(button, "aria-pressed", button.dataset.axis === this.axis);
      button.disabled = button.dataset.axis === "step" && !this.x.stepped;
    }
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
    const waiting = this.board.cards.filter((card) => card.dirty && card.visible && card.width > 0);
    if (waiting.length) {
      const card = waiting.reduce((oldest, each) =>
        each.drawnAt < oldest.drawnAt ? each : oldest,
      );
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
      for (const each of this.board.cards)
        if (each.visible && each.plotted) each.hoverAt(this.hoverX, each === this.hoverCard);
    });
  }

  // --- the end ---

  close() {
    this.closed = true;
    this.poller.close();
    this.detail.close();
    clearTimeout(this.rest);
    cancelAnimationFrame(this.frame);
    if (this.hoverFrame) cancelAnimationFrame(this.hoverFrame);
    this.board.close();
    window.removeEventListener("pointerup", this.onUp);
    window.removeEventListener("pointercancel", this.onUp);
    this.root.remove();
  }
}

// Streamlit calls this again on the same parent when `data` or the theme changes.
const views = (globalThis.stepscopeViews ??= new WeakMap());

export function stepscopeLive({ data, parentElement, setTriggerValue }) {
  let view = views.get(parentElement);
  if (!view) views.set(parentElement, (view = new LiveView(parentElement)));
  view.configure(data, setTriggerValue);
  return () => {
    view.close();
    views.delete(parentElement);
  };
}
