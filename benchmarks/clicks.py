"""How long a button takes while a real run trains in the server's own process.

All times are taken inside the page, from the `click` event's own time stamp:
`frame`, the server's first WebSocket message (its script run has begun); `answered`, the page says
that the command was sent (its script run has reached the charts); `acknowledged`, the page shows
that the training loop did it at a step boundary, read back from the run folder.
"""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

from playwright.sync_api import Browser, Page

from benchmarks.report import quantile, say
from benchmarks.serving import VIEWPORT, Server, await_charts, start_run
from stepscope.metrics import Stream
from stepscope.store import RunReader

ANSWERED_P95_MS = 100
ACKNOWLEDGED_MS = 300  # and one step
RECENT_ROWS = 2000

# Streamlit's own socket, with a listener of ours before its own.
WATCH_SOCKET = """
globalThis.frames_at = [];
globalThis.WebSocket = class extends WebSocket {
  constructor(...args) {
    super(...args);
    this.addEventListener("message", () => frames_at.push(performance.now()));
  }
};
"""
WATCH_CLICKS = """() => {
  const clicks = (globalThis.clicks = []);
  document.addEventListener("click", (event) => {
    clicks.push({ at: event.timeStamp, changes: [] });
  }, true);
  const ack = document.querySelector("[data-testid=ack]");
  new MutationObserver(() => {
    const waiting = ack.dataset.tone === "waiting";
    clicks.at(-1)?.changes.push({ at: performance.now(), waiting });
  }).observe(ack, { attributes: true, childList: true, characterData: true, subtree: true });
}"""
# The last click is over once a change that is not "waiting" has followed.
DONE = "() => clicks.at(-1)?.changes.some((change) => !change.waiting)"
COLLECT = """() => clicks.map(({ at, changes }) => ({
  frame: (frames_at.find((time) => time > at) ?? NaN) - at,
  answered: changes[0].at - at,
  acknowledged: changes.find((change) => !change.waiting).at - at,
}))"""


def measure_clicks(server: Server, browser: Browser, count: int, settle_s: float) -> dict[str, Any]:
    """Press Mark event `count` times while the digits CNN trains in the server's thread."""
    context = browser.new_context(viewport=VIEWPORT)
    context.add_init_script(WATCH_SOCKET)
    page = context.new_page()
    known = set(server.runs.iterdir())
    start_run(page, f"{server.url}/?epochs=100000")
    await_charts(page)
    page.wait_for_timeout(settle_s * 1000)
    page.evaluate(WATCH_CLICKS)
    say(f"clicks: {count} while training")
    for _ in range(count):
        _press(page)
    found: list[dict[str, float]] = page.evaluate(COLLECT)
    (folder,) = set(server.runs.iterdir()) - known
    step_ms = _median_step_ms(folder)
    page.get_by_role("button", name="Stop", exact=True).click()
    page.locator("[data-testid=stepscope-live][data-status=stopped]").wait_for(timeout=10_000)
    context.close()
    return {"clicks": len(found), "step_ms": step_ms, **_quantiles(found)}


def _press(page: Page) -> None:
    # At no fixed phase of the polls.
    page.wait_for_timeout(random.uniform(600, 1300))
    page.get_by_role("button", name="Mark event", exact=True).click()
    page.wait_for_function(DONE, timeout=20_000)


def _quantiles(found: list[dict[str, float]]) -> dict[str, Any]:
    return {
        f"{name}_ms": {
            "p50": quantile([click[name] for click in found], 0.5),
            "p95": quantile([click[name] for click in found], 0.95),
            "max": max(click[name] for click in found),
        }
        for name in ("frame", "answered", "acknowledged")
    }


def _median_step_ms(folder: Path) -> float | None:
    with RunReader(folder) as reader:
        (steps,) = [info for info in reader.series() if info.stream == Stream.STEPS]
        block = reader.read(steps.id, max(0, steps.rows - RECENT_ROWS), steps.rows, 1)
    times = block.mean[block.keys.index("perf/step_time")]
    return quantile([1000 * seconds for seconds in times.tolist() if seconds == seconds], 0.5)
