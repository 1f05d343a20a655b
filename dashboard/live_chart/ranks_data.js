// What is known of the ranks of a job, and what is drawn of it. Pure: no DOM. The other end of
// dashboard/ranks/ranks_response.py.

import { clock, isNumber, stepTicks, timeTicks } from "./format.js";

function halfFloat(bits) {
  const [sign, exponent, part] = [bits & 0x8000 ? -1 : 1, (bits >> 10) & 31, bits & 1023];
  if (exponent === 31) return part ? NaN : sign * Infinity;
  return sign * (exponent ? 2 ** (exponent - 15) * (1 + part / 1024) : 2 ** -14 * (part / 1024));
}

// The values of a strip in base64, null where there is none: `columns` lists of `ranks` values.
export function unpacked({ data, scale }, columns, ranks) {
  const floats = new DataView(Uint8Array.from(atob(data), (byte) => byte.charCodeAt(0)).buffer);
  return Array.from({ length: columns }, (_, column) =>
    Array.from({ length: ranks }, (_, rank) => {
      const share = halfFloat(floats.getUint16(2 * (column * ranks + rank), true));
      return Number.isFinite(share) ? share * scale : null;
    }),
  );
}

const EMPTY_SHARE = 0.05; // of the axis, at its beginning, beyond which it is left out

const STATES = {
  a: "alive",
  p: "starting",
  f: "finished",
  s: "stopped",
  x: "failed",
  c: "dead",
};
const stateWord = (state) => STATES[state] ?? state;
const WENT_WRONG = ["x", "c"];

export class RankData {
  constructor() {
    this.metric = ""; // that the reader chose, "" for the first there is
    this.axis = "time"; // or "step", as in the charts
    this.open(null);
  }

  open(run) {
    this.run = run;
    this.answer = null; // the newest with a table
    this.named = null; // the newest with names
    this.who = "";
    this.unread = 0;
    this.live = true;
    this.metrics = [];
    this.forget();
  }

  forget() {
    this.columns = "";
    this.seen = 0;
    this.more = false;
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

  // What the next poll asks for.
  question() {
    const { run, metric, axis, columns, seen, who, more } = this;
    const rest = more && this.answer ? { only_strips: 1 } : {};
    return { run, metric, axis, columns, seen, who, ...rest };
  }

  take(answer) {
    this.unread = answer.unread;
    this.now = answer.now;
    this.live = answer.live;
    if (!answer.who) return;
    if (answer.ranks) {
      this.named = answer;
      this.answer = null; // its rows are of other ranks
    }
    this.who = answer.who;
    if (answer.table) this.answer = answer;
    this.metrics = answer.metrics;
    this.takeStrip(answer);
    this.more = answer.more || !this.answer;
  }

  takeStrip({ columns, metric, width, seen, strip }) {
    if (columns !== this.columns || metric !== this.shown) this.forget();
    Object.assign(this, { columns, seen, width, shown: metric });
    if (!strip) return;
    const ranks = this.named.ranks.length;
    unpacked(strip, strip.at.length, ranks).forEach((values, i) => {
      this.cells[strip.at[i]] = values;
    });
  }

  get ranks() {
    return this.named?.ranks.length ?? 0;
  }

  // One rank over the axis as {xs, values}: where it has values only. `xs` are the middles of columns.
  line(row) {
    const [xs, values] = [[], []];
    this.cells.forEach((column, at) => {
      if (!isNumber(column?.[row])) return;
      xs.push((at + 0.5) * this.width);
      values.push(column[row]);
    });
    return { xs, values };
  }

  // The same for a strip: from the beginning of the first column to the end of the last.
  strip(row) {
    const { xs, values } = this.line(row);
    const half = this.width / 2;
    if (!xs.length) return { xs, values };
    return {
      xs: [...xs.map((x) => x - half), xs.at(-1) + half],
      values: [...values, values.at(-1)],
    };
  }

  // The mean of all ranks over the axis, where any has a value.
  meanLine() {
    const [xs, values] = [[], []];
    this.cells.forEach((column, at) => {
      const known = column.filter(isNumber);
      if (!known.length) return;
      xs.push((at + 0.5) * this.width);
      values.push(known.reduce((sum, value) => sum + value, 0) / known.length);
    });
    return { xs, values };
  }

  // The beginning of the axis in seconds or steps: a job takes its time until the first step.
  get begin() {
    const first = this.cells.findIndex((column) => column?.some(isNumber));
    return first > 0 && first * this.width > EMPTY_SHARE * this.end ? first * this.width : 0;
  }

  // The end of the axis in seconds or steps. Time goes on where nothing is recorded.
  get end() {
    const now = this.axis === "time" ? this.now || 0 : 0;
    return Math.max(this.cells.length * this.width, now, 1e-3);
  }

  get axisName() {
    return this.axis === "time" ? "time" : "steps";
  }

  // Round places on the axis, as many as a width in px holds: {values, text}. A step has its label
  // below its middle.
  ticks(width) {
    const count = Math.max(3, Math.floor(width / 100));
    if (this.axis === "time") return timeTicks(this.begin, this.end, count);
    const { values, text } = stepTicks(this.begin, this.end, count);
    return { values: values.map((value) => value + 0.5), text };
  }

  // Where a place on the axis is: "3:05", "step 7", "steps 1,024–1,055", all that its column has.
  where(x) {
    if (this.axis === "time") return clock(x);
    const first = Math.floor(x / this.width) * this.width;
    const [from, to] = [first, first + this.width - 1].map((step) => step.toLocaleString("en-US"));
    return from === to ? `step ${from}` : `steps ${from}–${to}`;
  }

  // The table's rows in the order of the ranks.
  rows() {
    if (!this.answer || !this.named) return [];
    const { table, state, ends } = this.answer;
    const ended = new Map(ends.map(([row, seconds, reason]) => [row, { seconds, reason }]));
    const here = this.named.ranks.map(([number, rank, host, place], row) => ({
      row,
      number,
      rank,
      host: this.named.hosts[host],
      place,
      step: table.step[row],
      time: table.time[row],
      wait: table.wait[row],
      own: ownTime(table.time[row], table.wait[row]),
      data: table.data[row],
      memory: table.memory[row],
      peak: table.peak[row],
      state: state[row],
      ended: ended.get(row) ?? null,
    }));
    return [...here, ...this.absent()];
  }

  // Rows of the ranks without a file: there is nothing to draw of them.
  absent() {
    return Object.entries(this.named.missing)
      .filter(([state]) => state !== "elsewhere")
      .flatMap(([state, ranks]) =>
        ranks.map((rank) => ({ row: null, number: -1 - rank, rank, state })),
      );
  }
}

// The time of a step that a rank needs itself, in seconds: null where its waiting is not known.
function ownTime(time, wait) {
  return isNumber(time) && isNumber(wait) ? time * (1 - wait / 100) : null;
}

// "alive", "dead since 3:05", "failed at 3:05".
export function stateWords({ state, ended }, clock) {
  const word = stateWord(state);
  if (!isNumber(ended?.seconds) || !WENT_WRONG.includes(state)) return word;
  return `${word} ${state === "c" ? "since" : "at"} ${clock(ended.seconds)}`;
}

export const wentWrong = ({ state }) => state === "never started" || WENT_WRONG.includes(state);

// Rows by a column; rows without a value last, equal ones by rank. Texts as they are read: GPU 2
// before GPU 10.
export function sorted(rows, key, descending) {
  const sign = descending ? -1 : 1;
  const read = (value) => (key === "state" ? stateWord(value) : value);
  const texts = (a, b) => read(a).localeCompare(read(b), "en", { numeric: true });
  const order = (a, b) => (typeof a === "string" ? texts(a, b) : a - b);
  const known = (row) => row[key] !== null && row[key] !== undefined && row[key] !== "";
  return [...rows].sort((a, b) => {
    if (known(a) !== known(b)) return known(a) ? -1 : 1;
    const found = known(a) ? sign * order(a[key], b[key]) : 0;
    return found || a.rank - b.rank;
  });
}

// The column that the table is sorted by until the reader chooses: where a rank is named, those that
// hold the others up come first.
export function usualSort(verdict, rows) {
  if (verdict?.kind !== "straggler") return { key: "rank", descending: false };
  const timed = rows.some((row) => isNumber(row.own));
  return { key: timed ? "own" : "time", descending: true };
}

// Numbers as a person says them: "3", "0–5 and 7", "1, 4 and 6".
export function listed(numbers) {
  const spans = [];
  for (const number of [...numbers].sort((a, b) => a - b)) {
    const last = spans.at(-1);
    if (last && last[1] === number - 1) last[1] = number;
    else spans.push([number, number]);
  }
  const words = spans.flatMap(([from, to]) =>
    to === from ? [`${from}`] : to === from + 1 ? [`${from}`, `${to}`] : [`${from}–${to}`],
  );
  return words.length > 1 ? `${words.slice(0, -1).join(", ")} and ${words.at(-1)}` : words.join("");
}

const ABSENT = {
  starting: (who) => `Nothing is heard yet of ${who}.`,
  "never started": (who, verb) => `${who} never started, or ${verb} not watched.`,
  elsewhere: (who, verb) =>
    `${who} ${verb} recorded in another folder, if at all: hosts that share no disk have one each.`,
  "not recorded": (who) => `${who} did not call stepscope.init, or never started.`,
};

// What is said of ranks that are not here; "" where all are.
export function missingWords({ missing, left_out: more }) {
  const said = Object.entries(missing).map(([state, numbers]) => {
    const one = numbers.length === 1;
    const who = `${one ? "rank" : "ranks"} ${listed(numbers)}`;
    const text = ABSENT[state]?.(who, one ? "is" : "are") ?? `${who}: ${state}.`;
    return text[0].toUpperCase() + text.slice(1);
  });
  if (more)
    said.push(`${more} more ${more === 1 ? "rank is" : "ranks are"} recorded and not shown.`);
  return said.join(" ");
}

const FROM_ZERO = new Set(["perf/comm_wait", "perf/data_wait"]);
const LEAST_SPREAD = 0.7; // of the highest value: else noise would look like a difference
const HIGH_SHARE = 0.98; // values above this quantile have the strongest color: the first steps

// The values of the weakest and the strongest color; null without values.
export function colorRange(cells, metric) {
  const values = cells
    .flat()
    .filter(isNumber)
    .sort((a, b) => a - b);
  if (!values.length) return null;
  if (metric === "gpu/util") return { low: 0, high: 100, over: false };
  const most = values.at(-1);
  const high = values[Math.floor(HIGH_SHARE * (values.length - 1))];
  const low = FROM_ZERO.has(metric) ? 0 : Math.min(values[0], LEAST_SPREAD * high);
  return { low, high: high > low ? high : low + (Math.abs(low) || 1), over: most > 1.02 * high };
}
