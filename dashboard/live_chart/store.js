// The state of the page: which run is shown, what is known of it, and what the reader chose. It is
// changed by the functions below only. Pure: no DOM.

import { convertX, xsOf } from "./lines.js";
import { cursorText, mergeSeries } from "./series.js";

const MAX_EVENTS = 2000;
const ENDED = new Set(["finished", "stopped", "failed", "crashed"]);
const WAITING_MAX_MS = 5_000;
const MIN_SPAN = { step: 2, time: 0.05 };
const DEFAULTS = {
  axis: "step",
  zoom: null,
  zoomAxis: null,
  log: false,
  smoothing: 0.6,
  unfolded: false,
  stacked: false,
};

export class Store {
  // `moved()` is called when another part of the horizontal axis is shown, `wanted()` when the next
  // poll asks for more. `only` is the one series that is asked for, null for all that are drawn.
  constructor(moved, wanted = () => {}, only = null) {
    Object.assign(this, { moved, wanted, only });
    this.header = null; // what the page's script knows: runs, buttons, what is in the way
    this.shownError = null; // id of the script's last error
    this.tab = "overview"; // the view of the run that is open
    this.connection = null; // why the server's answer is not there
    this.open(null);
  }

  // Shows another run: nothing is known of it yet but what the reader chose for it before.
  open(run) {
    this.run = run;
    this.layout = null;
    this.live = {}; // the series as polled
    this.detail = null; // finer series for the zoom
    this.events = [];
    this.answer = null; // the newest one
    this.lastEvent = 0; // the id of the newest event of rank 0
    this.rankEvents = new Set(); // the ids of the other ranks' events
    this.rankEventsSeen = ""; // the newest of them, as the server names it
    this.afresh = false; // the next poll asks for all rows
    this.unreadable = null; // why the run cannot be shown
    this.command = null; // the last button pressed: {id, name, text, tone, at, kind}
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
    this.afresh = this.answer !== null; // of a metric that is new here, earlier rows were not sent
  }

  get ended() {
    return ENDED.has(this.answer?.status);
  }

  setConnection(sentence) {
    this.connection = sentence;
  }

  // The server has said that there is nothing to show, and why.
  setUnreadable(sentence) {
    this.unreadable = sentence;
  }

  // --- what was asked of the run: drawn at once, confirmed or refused later ---

  ask(id, name, text) {
    this.command = { id, name, text, tone: "waiting", at: performance.now() };
  }

  // The outcome of a command; of an older one than the last it is not shown.
  // `kind` is that of the event that tells of it.
  settle(id, text, tone, kind = null) {
    if (this.command && this.command.id > id) return;
    this.command = { id, name: null, text, tone, at: 0, kind };
  }

  // What the header says of the last command. What a Stop did, and what to try if the run goes on,
  // is over once the run has ended: its status says how.
  get told() {
    return this.ended && this.command?.kind === "stop" ? null : this.command;
  }

  // The name of the command that the run has not answered yet, for a while.
  get waitingFor() {
    const { command } = this;
    const fresh = command?.tone === "waiting" && performance.now() - command.at < WAITING_MAX_MS;
    return fresh ? command.name : null;
  }

  // --- polling ---

  // What the next poll asks for.
  question() {
    return {
      run: this.run,
      since: this.afresh ? "" : cursorText(this.live),
      events: this.lastEvent,
      ...(this.rankEventsSeen ? { rank_events: this.rankEventsSeen } : {}),
      ...this.extras(),
    };
  }

  // What only the folded charts show, and the parts of the memory, are asked for while they are seen.
  extras() {
    if (this.only) return { only: this.only };
    const { unfolded, stacked } = this.prefs;
    return {
      ...(unfolded ? { include_folded: 1 } : {}),
      ...(stacked ? { include_ledger: 1 } : {}),
    };
  }

  // Takes an answer to a poll; returns the events that are new.
  take(answer) {
    this.afresh = false;
    for (const [name, part] of Object.entries(answer.series))
      this.live[name] = mergeSeries(this.live[name], part);
    this.answer = answer;
    const own = (answer.events || []).filter((event) => event.id > this.lastEvent);
    this.lastEvent = own.at(-1)?.id ?? this.lastEvent;
    // The events of other ranks have ids of their own, and may come later than what they tell of.
    const others = (answer.rank_events || []).filter((event) => !this.rankEvents.has(event.id));
    for (const event of others) this.rankEvents.add(event.id);
    this.rankEventsSeen = answer.rank_events_seen || "";
    const fresh = [...own, ...others];
    this.events = [...this.events, ...fresh].slice(-MAX_EVENTS);
    if (others.length) this.events.sort((a, b) => a.t - b.t);
    return fresh;
  }

  // Finer series for the zoom, or null for none.
  setDetail(parts) {
    this.detail =
      parts &&
      Object.fromEntries(
        Object.entries(parts).map(([name, part]) => [name, mergeSeries(null, part)]),
      );
  }

  // What a chart draws: the zoom's detail where there is some, else all that is held.
  source(name) {
    const finer = this.detail?.[name];
    return finer?.start.length ? finer : this.live[name];
  }

  // --- the reader's choices, kept for the run until the tab is closed ---

  set(name, value) {
    this.prefs[name] = value;
    this.save();
  }

  toggleHidden(line) {
    const { hidden } = this.prefs;
    const rest = hidden.filter((each) => each !== line);
    this.set("hidden", rest.length < hidden.length ? rest : [...hidden, line]);
  }

  // Unfolds the charts below, whose rows come from the beginning, or folds them away.
  showFolded(shown) {
    this.set("unfolded", shown);
    this.afresh ||= shown;
  }

  // Draws the parts of the memory, or its lines.
  showStacked(shown) {
    this.set("stacked", shown);
    if (shown) this.wanted();
  }

  save() {
    try {
      sessionStorage.setItem(`stepscope:${this.run}`, JSON.stringify(this.prefs));
    } catch {
      // storage blocked or full: the choice lasts until the page is reloaded
    }
  }

  // --- the one horizontal axis of all charts: steps or seconds, and the part of it that is shown ---

  get onlyTime() {
    return this.layout?.axis === "time";
  }

  get stepped() {
    return !this.onlyTime && this.live.steps?.t.length > 0;
  }

  // Before the first step there is only time, and a recording never has a step.
  get axis() {
    return this.stepped ? this.prefs.axis : "time";
  }

  // The part that the reader chose, null for all of it.
  get zoom() {
    const { zoom, zoomAxis } = this.prefs;
    return zoom && zoomAxis === this.axis ? zoom : null;
  }

  // [first, last] x over all series, null before any.
  extent() {
    const { live } = this;
    let [low, high] = [Infinity, -Infinity];
    // What is sampled before a resumed run's first step carries step 0.
    for (const series of this.axis === "step" ? [live.steps] : Object.values(live)) {
      const xs = xsOf(series, this.axis);
      if (!xs.length) continue;
      low = Math.min(low, xs[0]);
      high = Math.max(high, xs[xs.length - 1]);
    }
    return low <= high ? [low, high] : null;
  }

  get range() {
    if (this.zoom) return this.zoom;
    const [low, high] = this.extent() || [0, 1];
    const from = this.axis === "time" ? Math.min(0, low) : low;
    return [from, Math.max(high, from + MIN_SPAN[this.axis])];
  }

  // Shows this part of the axis, all of it for null.
  zoomTo(range) {
    const { zoom } = this;
    if (zoom === range || (zoom && range && zoom[0] === range[0] && zoom[1] === range[1])) return;
    this.prefs.zoom = range && widened(range, MIN_SPAN[this.axis]);
    this.prefs.zoomAxis = this.axis;
    this.move();
  }

  // Draws over steps or over time; a zoom stays on the same rows.
  chooseAxis(name) {
    const { zoom, axis, live } = this;
    if (name === this.prefs.axis && name === axis) return;
    this.prefs.axis = name;
    if (zoom && this.axis !== axis)
      this.zoomTo(zoom.map((x) => convertX(live.samples || live.steps, this.axis, x)));
    else this.move();
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
    return {}; // storage blocked or foreign content: start with defaults
  }
}
