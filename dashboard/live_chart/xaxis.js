// The one horizontal axis of all charts: steps or seconds, and the part of it that is shown.

const MIN_SPAN = { step: 2, time: 0.05 };

class XAxis {
  // `view` gives prefs and live; `changed()` is called when another part is to be drawn.
  constructor(view, changed) {
    Object.assign(this, { view, changed, only: null });
  }

  get stepped() {
    return !this.only && this.view.live.steps?.t.length > 0;
  }

  // Before the first step there is only time, and a recording never has a step.
  get name() {
    return this.stepped ? this.view.prefs.axis : "time";
  }

  get zoom() {
    const { zoom, zoomAxis } = this.view.prefs;
    return zoom && zoomAxis === this.name ? zoom : null;
  }

  set zoom(range) {
    this.view.prefs.zoom = range && this.widen(range);
    this.view.prefs.zoomAxis = this.name;
    this.changed();
  }

  // [first, last] x over all series, null before any.
  extent() {
    const { live } = this.view;
    let [low, high] = [Infinity, -Infinity];
    // What is sampled before a resumed run's first step carries step 0.
    for (const series of this.name === "step" ? [live.steps] : Object.values(live)) {
      const xs = xsOf(series, this.name);
      if (!xs.length) continue;
      low = Math.min(low, xs[0]);
      high = Math.max(high, xs[xs.length - 1]);
    }
    return low <= high ? [low, high] : null;
  }

  get range() {
    if (this.zoom) return this.zoom;
    const [low, high] = this.extent() || [0, 1];
    const from = this.name === "time" ? Math.min(0, low) : low;
    return [from, Math.max(high, from + MIN_SPAN[this.name])];
  }

  choose(name) {
    const { prefs, live } = this.view;
    if (name === prefs.axis && name === this.name) return;
    const { zoom, name: before } = this;
    prefs.axis = name;
    this.view.hoverX = null;
    if (zoom && this.name !== before)
      this.zoom = zoom.map((x) => convertX(live.samples || live.steps, this.name, x));
    else this.changed();
  }

  widen([from, to]) {
    const missing = Math.max(0, MIN_SPAN[this.name] - (to - from)) / 2;
    return [from - missing, to + missing];
  }
}
