"""How long a button takes while a real run trains in the server's own process.

All times are taken inside the page, from the `click` event's own time stamp:
`answered`, the frame in which the page says that the command was sent has been painted;
`acknowledged`, the page shows that the training loop did it at a step boundary, read back from the
run folder.
"""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

from playwright.sync_api import Browser, Page

from benchmarks.report import quantile, say
from benchmarks.serving import VIEWPORT, Server, await_charts, start_run
from stepscope.common.metrics import Stream
from stepscope.store import StoreReader

ANSWERED_P95_MS = 40
ACKNOWLEDGED_MS = 300  # and one step
RECENT_ROWS = 2000
HOVER_MS = (100, 300)
"""Between the arrival of a pointer on a button and the click: of a person, about."""

# A message that is posted in a frame's callback arrives once the frame has been painted.
WATCH_CLICKS = """() => {
  const clicks = (globalThis.clicks = []);
  const painted = (then) => requestAnimationFrame(() => {
    const channel = new MessageChannel();
    channel.port1.onmessage = then;
    channel.port2.postMessage(null);
  });
  document.addEventListener("click", (event) => clicks.push({ at: event.timeStamp }), true);
  const ack = document.querySelector("[data-testid=ack]");
  new MutationObserver(() => {
    const [click, tone] = [clicks.at(-1), ack.dataset.tone];
    const name = tone === "waiting" ? "answered" : "acknowledged";
    painted(() => { if (click) click[name] ??= performance.now() - click.at; });
  }).observe(ack, { attributes: true, childList: true, characterData: true, subtree: true });
}"""
DONE = "() => clicks.at(-1)?.acknowledged"
BUTTON = "Reset peak stats"
"""One whose work in the training loop is small."""


def measure_clicks(server: Server, browser: Browser, count: int, settle_s: float) -> dict[str, Any]:
    """Press a button `count` times while the digits CNN trains in the server's thread."""
    context = browser.new_context(viewport=VIEWPORT)
    page = context.new_page()
    known = set(server.runs.iterdir())
    start_run(page, f"{server.url}/?epochs=100000")
    await_charts(page)
    page.wait_for_timeout(settle_s * 1000)
    page.evaluate(WATCH_CLICKS)
    say(f"clicks: {count} while training")
    for _ in range(count):
        _press(page)
    found: list[dict[str, float]] = page.evaluate("() => clicks")
    (folder,) = set(server.runs.iterdir()) - known
    step_ms = _median_step_ms(folder)
    page.get_by_role("button", name="Stop", exact=True).click()
    page.locator("[data-testid=stepscope-live][data-status=stopped]").wait_for(timeout=10_000)
    context.close()
    return {"clicks": len(found), "step_ms": step_ms, **_quantiles(found)}


def _press(page: Page) -> None:
    # At no fixed phase of the polls, and from elsewhere on the page.
    page.mouse.move(VIEWPORT["width"] / 2, VIEWPORT["height"] / 2)
    page.wait_for_timeout(random.uniform(600, 1300))
    button = page.get_by_role("button", name=BUTTON, exact=True)
    button.hover()
    page.wait_for_timeout(random.uniform(*HOVER_MS))
    button.click()
    page.wait_for_function(DONE, timeout=20_000)


def _quantiles(found: list[dict[str, float]]) -> dict[str, Any]:
    return {
        f"{name}_ms": {
            "p50": quantile([click[name] for click in found], 0.5),
            "p95": quantile([click[name] for click in found], 0.95),
            "max": max(click[name] for click in found),
        }
        for name in ("answered", "acknowledged")
    }


def _median_step_ms(folder: Path) -> float | None:
    with StoreReader(folder) as reader:
        (steps,) = [info for info in reader.series() if info.stream == Stream.STEPS]
        block = reader.read(steps.id, max(0, steps.rows - RECENT_ROWS), steps.rows, 1)
    times = block.mean[block.keys.index("perf/step_time")]
    return quantile([1000 * seconds for seconds in times.tolist() if seconds == seconds], 0.5)
