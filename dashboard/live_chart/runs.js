// A page that shows no run looks out for one: it draws nothing and runs the page again once the list
// of runs is another.

const RUNS_PACE_MS = 1_000;

class RunsWatch {
  constructor() {
    this.told = null;
    this.poller = new Poller({
      url: () => "/api/runs",
      pace: () => RUNS_PACE_MS,
      take: ({ page }) => {
        if (page === this.data.page || page === this.told) return;
        this.told = page;
        this.setTriggerValue("stale", page);
      },
      trouble: () => {},
    });
  }

  configure(data, setTriggerValue) {
    Object.assign(this, { data, setTriggerValue, told: null });
    this.poller.now();
  }

  close() {
    this.poller.close();
  }
}

const watches = new WeakMap();

export function watchRuns({ data, parentElement, setTriggerValue }) {
  let watch = watches.get(parentElement);
  if (!watch) watches.set(parentElement, (watch = new RunsWatch()));
  watch.configure(data, setTriggerValue);
  return () => {
    watch.close();
    watches.delete(parentElement);
  };
}
