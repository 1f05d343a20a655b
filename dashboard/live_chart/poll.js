// Polls of the server: one request at a time, none while the browser tab is hidden, slower after errors.

import { short } from "./format.js";

const TIMEOUT_MS = 10_000;
const MAX_BACKOFF_MS = 8_000;
const DETAIL_DELAY_MS = 250;
const MIN_DETAIL_PACE_MS = 2_000;

// A permanent error: there is no such run, or it cannot be read.
class RefusedError extends Error {}

// Returns the answer as JSON. Throws an Error with a sentence for the user.
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
  const permanent = response.status >= 400 && response.status < 500;
  const Failure = permanent ? RefusedError : Error;
  const incomplete = "The server's answer was incomplete.";
  throw new Failure(body?.error || (response.ok ? incomplete : `HTTP ${response.status}.`));
}

export class Poller {
  // `url()` returns the next address, `pace()` the interval in ms. Each answer goes to `take(answer)`,
  // a permanent error to `refused(sentence)`, the state of the connection to `trouble(sentence or
  // null)`.
  constructor({ url, pace, take, trouble, refused = trouble }) {
    Object.assign(this, { url, pace, take, trouble, refused });
    Object.assign(this, { failures: 0, timer: 0, abort: null, closed: false });
    this.onVisible = () => this.now();
    document.addEventListener("visibilitychange", this.onVisible);
  }

  // Polls at once, or right after the current request.
  now() {
    if (this.abort) this.again = true;
    else this.plan(0);
  }

  // Polls at once and drops the answer to the current request, which is of another run.
  restart() {
    this.abort?.abort();
    this.abort = null;
    this.failures = 0;
    this.plan(0);
  }

  plan(delay) {
    clearTimeout(this.timer);
    if (!this.closed && !document.hidden) this.timer = setTimeout(() => this.poll(), delay);
  }

  async poll() {
    const abort = (this.abort = new AbortController());
    const started = performance.now();
    let answer = null;
    try {
      answer = await ask(this.url(), abort.signal);
      this.failures = 0;
    } catch (error) {
      if (abort.signal.aborted) return;
      this.fail(error);
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

  fail(error) {
    const permanent = error instanceof RefusedError;
    this.failures = permanent ? 0 : this.failures + 1;
    const retry = `${error.message} Retrying in ${short(this.backoff() / 1000)} s.`;
    this.trouble(permanent ? null : retry);
    if (permanent) this.refused(error.message);
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

// Finer data for a zoom from /api/window, drawn in place of the polled data.
export class ZoomDetail {
  // `show()` is called with new data, `trouble(sentence)` after an error.
  constructor(store, show, trouble) {
    Object.assign(this, { store, show, trouble, timer: 0, abort: null, askedAt: 0, end: null });
  }

  // Requests the data of a new zoom, after a delay.
  plan() {
    this.close();
    if (this.store.zoom) this.timer = setTimeout(() => this.fetch(), DETAIL_DELAY_MS);
  }

  async fetch() {
    const { run, axis, live, zoom } = this.store;
    this.abort?.abort();
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

  // Requests the detail again while rows are added to the zoomed part, or once polled rows are merged.
  follow() {
    const { zoom, detail, live } = this.store;
    const newest = this.store.extent()?.[1];
    const soon = performance.now() - this.askedAt < MIN_DETAIL_PACE_MS;
    if (!zoom || newest === this.end || zoom[0] > newest || soon) return;
    const merged = !detail && Object.values(live).some((series) => series.bucket > 1);
    if (merged || zoom[1] >= (this.end ?? newest)) this.fetch();
    this.end = newest;
  }

  close() {
    clearTimeout(this.timer);
    this.abort?.abort();
  }
}
