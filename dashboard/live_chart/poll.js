// Polls of the server: one request in flight, none while the tab is hidden, slower after errors.

import { short } from "./format.js";

const TIMEOUT_MS = 10_000;
const MAX_BACKOFF_MS = 8_000;
const DETAIL_DELAY_MS = 250;
const DETAIL_REFRESH_MS = 2_000;

// An answer that would be the same if asked again: there is no such run, or it cannot be read.
class Refusal extends Error {}

// The answer as JSON; throws an Error whose message is a sentence for the reader.
export async function ask(url, signal = null, options = {}) {
  const timeout = AbortSignal.timeout(TIMEOUT_MS);
  let response;
  try {
    const any = signal ? AbortSignal.any([signal, timeout]) : timeout;
    response = await fetch(url, { cache: "no-store", ...options, signal: any });
  } catch (error) {
    if (signal?.aborted) throw error;
    throw new Error("The dashboard server is not responding; training and recording continue.");
  }
  const body = await response.json().catch(() => null);
  if (response.ok && body) return body;
  const sentence = body?.error || `The server answered ${response.status}.`;
  throw response.status >= 400 && response.status < 500
    ? new Refusal(sentence)
    : new Error(sentence);
}

export class Poller {
  // `url()` gives the next address, `pace()` the pause in ms, `take(answer)` gets each answer,
  // `refused(sentence)` an answer that stays so, `trouble(sentence or null)` the state of the
  // connection. While `idle()` is true nothing is asked; `now` goes on.
  constructor({ url, pace, take, refused, trouble, idle = () => false }) {
    Object.assign(this, { url, pace, take, refused, trouble, idle });
    this.failures = 0;
    this.timer = 0;
    this.abort = null;
    this.closed = false;
    this.onVisible = () => this.now();
    document.addEventListener("visibilitychange", this.onVisible);
  }

  // Polls at once, or right after the request in flight.
  now() {
    if (this.abort) this.again = true;
    else this.plan(0);
  }

  // Forgets a request in flight: its answer belongs to another run.
  restart() {
    this.abort?.abort();
    this.abort = null;
    this.failures = 0;
    this.plan(0);
  }

  plan(delay) {
    clearTimeout(this.timer);
    const rests = this.closed || document.hidden || this.idle();
    if (!rests) this.timer = setTimeout(() => this.poll(), delay);
  }

  async poll() {
    if (this.idle()) return; // since the poll was planned
    const abort = (this.abort = new AbortController());
    const started = performance.now();
    let answer = null;
    try {
      answer = await ask(this.url(), abort.signal);
      this.failures = 0;
    } catch (error) {
      if (abort.signal.aborted) return;
      if (error instanceof Refusal) {
        this.failures = 0;
        this.trouble(null);
        this.refused(error.message);
      } else {
        this.failures += 1;
        this.trouble(`${error.message} Trying again in ${short(this.backoff() / 1000)} s.`);
      }
    }
    if (this.abort !== abort) return;
    this.abort = null;
    if (this.failures) this.plan(this.backoff());
    else this.plan(this.again ? 0 : Math.max(0, this.pace() - (performance.now() - started)));
    this.again = false;
    if (answer) {
      this.trouble(null);
      this.take(answer);
    }
  }

  backoff() {
    return Math.min(MAX_BACKOFF_MS, 500 * 2 ** (this.failures - 1));
  }

  close() {
    this.closed = true;
    clearTimeout(this.timer);
    this.abort?.abort();
    this.abort = null;
    document.removeEventListener("visibilitychange", this.onVisible);
  }
}

// Finer data for a zoom, from /api/window; drawn in place of what is held while the zoom lasts.
export class ZoomDetail {
  // `show()` is called when there is more to draw, `trouble(sentence)` when it could not be had.
  constructor(store, show, trouble) {
    Object.assign(this, { store, show, trouble, timer: 0, abort: null, askedAt: 0, end: null });
  }

  // The zoom changed: ask soon.
  plan() {
    this.close();
    if (this.store.zoom) this.timer = setTimeout(() => this.fetch(), DETAIL_DELAY_MS);
  }

  async fetch() {
    const { run, axis, live, zoom } = this.store;
    this.askedAt = performance.now();
    const whole = Object.values(live).every((series) => series.bucket === 1);
    if (!zoom || whole) return this.show();
    const abort = (this.abort = new AbortController());
    try {
      const [from, to] = zoom;
      const query = new URLSearchParams({ run, axis, from, to, ...this.store.extras() });
      const answer = await ask(`/api/window?${query}`, abort.signal);
      this.store.setDetail(answer.series);
      this.show();
    } catch (error) {
      if (!abort.signal.aborted) this.trouble(`No finer detail for this zoom: ${error.message}`);
    }
    return undefined;
  }

  // A zoom that reaches past the newest point keeps growing.
  follow() {
    const { zoom } = this.store;
    const newest = this.store.extent()?.[1];
    const soon = performance.now() - this.askedAt < DETAIL_REFRESH_MS;
    if (!zoom || newest === this.end || zoom[0] > newest || soon) return;
    if (zoom[1] >= (this.end ?? newest)) this.fetch();
    this.end = newest;
  }

  close() {
    clearTimeout(this.timer);
    this.abort?.abort();
  }
}
