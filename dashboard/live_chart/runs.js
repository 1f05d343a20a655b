// A page that shows no run looks out for one: it draws nothing and runs the page again once the list
// of runs is another.

import { Poller } from "./poll.js";

const RUNS_PACE_MS = 1_000;

class RunsWatch {
  constructor() {
    this.told = null;
    this.poller = new Poller({
      url: () => "/api/runs",
      pace: () => RUNS_PACE_MS,
      take: ({ page_token: token }) => {
        if (token === this.data.page_token || token === this.told) return;
        this.told = token;
        this.setTriggerValue("stale", token);
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
