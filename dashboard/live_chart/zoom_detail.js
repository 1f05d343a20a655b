// Finer data for a zoom, from /api/window; drawn in place of what is held while the zoom lasts.

import { ask } from "./poll.js";

const DETAIL_DELAY_MS = 250;
const DETAIL_REFRESH_MS = 2_000;

export class Detail {
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
