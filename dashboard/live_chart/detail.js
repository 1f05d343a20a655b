// Finer data for a zoom, from /api/window; drawn in place of what is held while the zoom lasts.

const DETAIL_DELAY_MS = 250;
const DETAIL_REFRESH_MS = 2_000;

class Detail {
  // `view` gives run, axis, zoom() and live; `show()` is called when there is more to draw.
  constructor(view, show, trouble) {
    Object.assign(this, {
      view,
      show,
      trouble,
      series: null,
      timer: 0,
      abort: null,
      askedAt: 0,
      end: null,
    });
  }

  // The zoom changed: drop what belongs to the old one and ask soon.
  plan() {
    this.close();
    this.series = null;
    if (this.view.zoom()) this.timer = setTimeout(() => this.fetch(), DETAIL_DELAY_MS);
  }

  async fetch() {
    const { run, axis, live, asksMore } = this.view;
    const zoom = this.view.zoom();
    this.askedAt = performance.now();
    const whole = Object.values(live).every((series) => series.bucket === 1);
    if (!zoom || whole) return this.show();
    const abort = (this.abort = new AbortController());
    try {
      const query = new URLSearchParams({
        run,
        axis,
        from: zoom[0],
        to: zoom[1],
        ...(asksMore ? { optimizer: 1 } : {}),
      });
      const answer = await ask(`/api/window?${query}`, abort.signal);
      this.series = {};
      for (const [name, part] of Object.entries(answer.series))
        this.series[name] = mergeSeries(null, part);
      this.show();
    } catch (error) {
      if (!abort.signal.aborted) this.trouble(`No finer detail for this zoom: ${error.message}`);
    }
    return undefined;
  }

  // A zoom that reaches past the newest point keeps growing.
  follow(newest, now) {
    const zoom = this.view.zoom();
    if (newest === this.end || zoom[0] > newest || now - this.askedAt < DETAIL_REFRESH_MS) return;
    if (zoom[1] >= (this.end ?? newest)) this.fetch();
    this.end = newest;
  }

  of(name) {
    const series = this.series?.[name];
    return series && series.start.length ? series : null;
  }

  close() {
    clearTimeout(this.timer);
    this.abort?.abort();
  }
}
