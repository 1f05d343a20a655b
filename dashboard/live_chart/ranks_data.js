// The data of the Ranks tab, without DOM: answers of dashboard/ranks/job_ranks.py, rows, texts.

import { clock, counted, isNumber, stepTicks, timeTicks } from "./format.js";

const MAX_EMPTY_SHARE = 0.05; // of the axis, before the first value; a longer part is cut

// Decodes the heatmap from base64: columns of 32-bit floats of all ranks, null for missing values.
export function unpacked(text, ranks) {
  const floats = new Float32Array(Uint8Array.from(atob(text), (byte) => byte.charCodeAt(0)).buffer);
  return Array.from({ length: floats.length / ranks }, (_, column) =>
    Array.from({ length: ranks }, (_, rank) => {
      const value = floats[column * ranks + rank];
      return Number.isFinite(value) ? value : null;
    }),
  );
}

const WENT_WRONG = ["failed", "dead"];

export class RankData {
  constructor() {
    this.metric = ""; // the user's choice, "" for the first available one
    this.axis = "time"; // or "step", as in the charts
    this.open(null);
  }

  open(run) {
    this.run = run;
    this.answer = null; // the newest one
    this.live = true;
    this.metrics = [];
    this.forget();
  }

  forget() {
    this.width = 1;
    this.cells = []; // column -> values of all ranks
    this.shown = null; // the metric of the cells
  }

  choose(metric) {
    this.metric = metric;
    this.forget();
  }

  chooseAxis(axis) {
    this.axis = axis;
    this.forget();
  }

  question() {
    const { run, metric, axis } = this;
    return { run, metric, axis };
  }

  // Takes an answer; it has no ranks while the server reads them.
  take(answer) {
    this.now = answer.now;
    this.live = answer.live;
    if (!answer.ranks || answer.axis !== this.axis) return;
    const { metrics, width, metric: shown, cells } = answer;
    Object.assign(this, { answer, metrics, width, shown });
    this.cells = unpacked(cells, answer.ranks.length);
  }

  get ranks() {
    return this.answer?.ranks.length ?? 0;
  }

  // Returns the values of a rank as {xs, values, times}; `xs` are the beginnings of columns.
  strip(row) {
    const known = [...this.cells.keys()].filter((at) => isNumber(this.cells[at]?.[row]));
    const xs = known.map((at) => at * this.width);
    return { xs, values: known.map((at) => this.cells[at][row]), times: xs };
  }

  // The beginning of the axis in seconds or steps. The start-up before the first step is cut.
  get begin() {
    const first = this.cells.findIndex((column) => column?.some(isNumber));
    return first > 0 && first * this.width > MAX_EMPTY_SHARE * this.end ? first * this.width : 0;
  }

  // The end of the axis in steps, or in seconds up to now.
  get end() {
    const now = this.axis === "time" ? this.now || 0 : 0;
    return Math.max(this.cells.length * this.width, now, 1e-3);
  }

  get axisName() {
    return this.axis === "time" ? "time" : "steps";
  }

  // Returns round places on the axis that fit a width in px; of a step the middle of its column.
  ticks(width) {
    const count = Math.max(3, Math.floor(width / 100));
    if (this.axis === "time") return timeTicks(this.begin, this.end, count);
    const { values, text } = stepTicks(this.begin, this.end, count);
    return { values: values.map((value) => value + 0.5), text };
  }

  // Returns a place on the axis as text: "3:05", "step 7", "steps 1,024–1,055" of a column.
  where(x) {
    if (this.axis === "time") return clock(x);
    const first = Math.floor(x / this.width) * this.width;
    const [from, to] = [first, first + this.width - 1].map(counted);
    return from === to ? `step ${from}` : `steps ${from}–${to}`;
  }

  // Returns the rows of the table in the order of the ranks, ranks without a file last.
  rows() {
    if (!this.answer) return [];
    const { table, state, ends, ranks, missing } = this.answer;
    const ended = new Map(ends.map(([row, seconds, reason]) => [row, { seconds, reason }]));
    const here = ranks.map(([rank, host, place], row) => {
      const values = Object.fromEntries(Object.keys(table).map((key) => [key, table[key][row]]));
      const own = ownTime(values.time, values.wait);
      const about = { row, rank, host, place, state: state[row], ended: ended.get(row) ?? null };
      return { ...about, ...values, own };
    });
    const absent = Object.entries(missing)
      .filter(([state]) => state !== "elsewhere")
      .flatMap(([state, ranks]) => ranks.map((rank) => ({ row: null, rank, state })));
    return [...here, ...absent];
  }
}

function ownTime(time, wait) {
  return isNumber(time) && isNumber(wait) ? time * (1 - wait / 100) : null;
}

// "alive", "dead since 3:05", "failed at 3:05".
export function stateWords({ state, ended }) {
  if (!isNumber(ended?.seconds) || !WENT_WRONG.includes(state)) return state;
  return `${state} ${state === "dead" ? "since" : "at"} ${clock(ended.seconds)}`;
}

export const isKnown = (value) => value !== null && value !== undefined && value !== "";

export const wentWrong = ({ state }) => state === "never started" || WENT_WRONG.includes(state);

// Returns the rows sorted by a column, GPU 2 before GPU 10: without a value last, equal ones by rank.
export function sorted(rows, key, descending) {
  const sign = descending ? -1 : 1;
  const texts = (a, b) => a.localeCompare(b, "en", { numeric: true });
  const order = (a, b) => (typeof a === "string" ? texts(a, b) : a - b);
  const known = (row) => isKnown(row[key]);
  return [...rows].sort((a, b) => {
    if (known(a) !== known(b)) return known(a) ? -1 : 1;
    const found = known(a) ? sign * order(a[key], b[key]) : 0;
    return found || a.rank - b.rank;
  });
}

// Returns the default sort order: the slowest ranks first if the diagnosis names a straggler.
export function usualSort(verdict, rows) {
  if (verdict?.kind !== "straggler") return { key: "rank", descending: false };
  const timed = rows.some((row) => isNumber(row.own));
  return { key: timed ? "own" : "time", descending: true };
}

const FROM_ZERO = new Set(["perf/comm_wait", "perf/data_wait"]);
const MAX_LOW_SHARE = 0.7; // of the highest value: noise must not look like a difference
const HIGH_QUANTILE = 0.98; // higher values, such as the first steps, have the strongest color

// Returns the values of the weakest and the strongest color; null without values.
export function colorRange(cells, metric) {
  const values = cells.flat().filter(isNumber);
  values.sort((a, b) => a - b);
  if (!values.length) return null;
  if (metric === "gpu/util") return { low: 0, high: 100, over: false };
  const most = values.at(-1);
  const high = values[Math.floor(HIGH_QUANTILE * (values.length - 1))];
  const low = FROM_ZERO.has(metric) ? 0 : Math.min(values[0], MAX_LOW_SHARE * high);
  return { low, high: high > low ? high : low + (Math.abs(low) || 1), over: most > 1.02 * high };
}
