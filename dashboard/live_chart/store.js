// The state of a view, changed only here: the shown run, its data, and the user's choices. No DOM.

import { cursorText, mergeSeries, xsOf } from "./series.js";

const MAX_EVENTS = 2000;
const ROUTINE = new Set(["epoch", "checkpoint"]); // dropped first
const MAX_WAITING_MS = 5_000;
const ENDED = new Set(["finished", "stopped", "failed", "crashed"]);
const MIN_SPAN = { step: 2, time: 0.05 };
const DEFAULTS = { axis: "step", log: false, smoothing: 0.6, unfolded: false };

export class Store {
  // `moved()` is called for another part of the axis.
  constructor(moved) {
    this.moved = moved;
    this.header = null; // content from the page's script: runs, buttons, errors
    this.shownError = null; // id of the script's last error
    this.tab = "overview"; // the open tab of the run
    this.connection = null; // why the server does not answer
    this.open(null);
  }

  // Shows another run, with the choices that the user made for that run before.
  open(run) {
    this.run = run;
    this.layout = null;
    this.live = {}; // the polled series
    this.detail = null; // finer series for the zoom
    this.events = [];
    this.answer = null; // the newest one
    this.lastEvent = 0; // the id of the newest event
    this.needsAllRows = false; // the next poll requests all rows
    this.unreadable = null; // why the run cannot be shown
    this.command = null; // the last command: {id, name, text, tone, at, kind}
    this.prefs = { ...DEFAULTS, hidden: [], ...stored(run) };
  }

  setHeader(header) {
    this.header = header;
    this.unreadable = header.trouble;
    const { error } = header;
    if (!error || error.id === this.shownError) return;
    this.shownError = error.id;
    this.command = { id: null, name: null, text: error.text, tone: "refused", at: 0 };
  }

  setLayout(layout) {
    this.layout = layout;
    this.needsAllRows = this.answer !== null; // earlier rows of a new metric were not sent
  }

  get ended() {
    return ENDED.has(this.answer?.status);
  }

  ask(id, name, text) {
    this.command = { id, name, text, tone: "waiting", at: performance.now() };
  }

  // Shows the outcome of a command, unless a newer command was sent. `kind` is the kind of its event.
  settle(id, text, tone, kind = null) {
    if (this.command && this.command.id > id) return;
    this.command = { id, name: null, text, tone, at: 0, kind };
  }

  // The command in the header. The advice of a Stop is obsolete once the run has ended.
  get shownCommand() {
    return this.ended && this.command?.kind === "stop" ? null : this.command;
  }

  // The name of the command without an answer, null after MAX_WAITING_MS.
  get waitingFor() {
    const { command } = this;
    const fresh = command?.tone === "waiting" && performance.now() - command.at < MAX_WAITING_MS;
    return fresh ? command.name : null;
  }

  question() {
    return {
      run: this.run,
      since: this.needsAllRows ? "" : cursorText(this.live),
      events: this.lastEvent,
      ...this.extras(),
    };
  }

  // Series of collapsed charts are requested only while they are shown.
  extras() {
    return this.prefs.unfolded ? { include_folded: 1 } : {};
  }

  // Merges the answer to a poll. Returns the new events.
  take(answer) {
    this.needsAllRows = false;
    for (const [name, part] of Object.entries(answer.series))
      this.live[name] = mergeSeries(this.live[name], part);
    this.answer = answer;
    const fresh = (answer.events || []).filter((event) => event.id > this.lastEvent);
    this.lastEvent = fresh.at(-1)?.id ?? this.lastEvent;
    let surplus = this.events.length + fresh.length - MAX_EVENTS;
    const drops = ({ kind }) => surplus > 0 && ROUTINE.has(kind) && surplus-- > 0;
    this.events = [...this.events, ...fresh].filter((event) => !drops(event)).slice(-MAX_EVENTS);
    return fresh;
  }

  setDetail(series) {
    const merged = Object.entries(series).map(([name, part]) => [name, mergeSeries(null, part)]);
    this.detail = Object.fromEntries(merged);
  }

  // The series that a chart draws: the zoom's detail, else the polled one.
  source(name) {
    const finer = this.detail?.[name];
    return finer?.start.length ? finer : this.live[name];
  }

  set(name, value) {
    this.prefs[name] = value;
    this.save();
  }

  toggleHidden(line) {
    const { hidden } = this.prefs;
    const rest = hidden.filter((each) => each !== line);
    this.set("hidden", rest.length < hidden.length ? rest : [...hidden, line]);
  }

  // Expands the collapsed charts, whose rows are requested from the beginning, or collapses them.
  showFolded(shown) {
    this.set("unfolded", shown);
    this.needsAllRows ||= shown;
  }

  save() {
    try {
      sessionStorage.setItem(`stepscope:${this.run}`, JSON.stringify(this.prefs));
    } catch {
      // storage blocked or full: the choice lasts until the page is reloaded
    }
  }

  get stepped() {
    return this.live.steps?.t.length > 0;
  }

  // Time before the first step.
  get axis() {
    return this.stepped ? this.prefs.axis : "time";
  }

  // The part that the user chose, null for the whole axis.
  get zoom() {
    const { zoom, zoomAxis } = this.prefs;
    return zoom && zoomAxis === this.axis ? zoom : null;
  }

  // [first, last] x over all series, null without rows.
  extent() {
    const { axis, live } = this;
    // Readings before the first step of a resumed run carry step 0.
    const all = axis === "step" ? [live.steps] : Object.values(live);
    const xs = all.map((series) => xsOf(series, axis)).filter(({ length }) => length);
    if (!xs.length) return null;
    return [Math.min(...xs.map((x) => x[0])), Math.max(...xs.map((x) => x.at(-1)))];
  }

  get range() {
    if (this.zoom) return this.zoom;
    const [low, high] = this.extent() || [0, 1];
    const from = this.axis === "time" ? Math.min(0, low) : low;
    return [from, Math.max(high, from + MIN_SPAN[this.axis])];
  }

  zoomTo(range) {
    if (String(this.zoom) === String(range)) return;
    this.prefs.zoom = range && widened(range, MIN_SPAN[this.axis]);
    this.prefs.zoomAxis = this.axis;
    this.move();
  }

  // Draws the whole run over steps, or over time.
  chooseAxis(name) {
    if (name === this.prefs.axis && name === this.axis) return;
    Object.assign(this.prefs, { axis: name, zoom: null });
    this.move();
  }

  move() {
    this.detail = null;
    this.save();
    this.moved();
  }
}

function widened([from, to], span) {
  const missing = Math.max(0, span - (to - from)) / 2;
  return [from - missing, to + missing];
}

function stored(run) {
  try {
    return JSON.parse(sessionStorage.getItem(`stepscope:${run}`)) || {};
  } catch {
    return {}; // storage blocked or foreign content: defaults
  }
}
