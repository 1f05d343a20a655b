"""What the live page costs server and browser, at any length of the run, and how fast it answers.

    python -m benchmarks.live_page [--quick] [--wait-quiet SECONDS]

For runs of 600, 60,000 and 1,000,000 recorded steps that go on at 25 steps/s (with one GPU and the
10 Hz sampler): per poll the server's CPU time above idle, the bytes, and the browser's main-thread
time; long tasks and frame gaps. The time from the address to the charts, beside that of a Streamlit
page with only a title. Then button presses during a real training run in the server.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil
from playwright.sync_api import Browser, CDPSession, Page

from benchmarks import report, serving
from benchmarks.clicks import ACKNOWLEDGED_MS, ANSWERED_P95_MS, measure_clicks
from benchmarks.report import at_most, quantile, say
from benchmarks.serving import ROOT, VIEWPORT, Server, cpu_seconds

SERVER_CPU_MS = 5
POLL_BYTES = 3000
OPENING_S = 1.0
"""From the address to the charts, more than a Streamlit page with only a title needs."""
CLIENT_SHARE = 0.25
GROWTH = 1.25
"""Largest over smallest run, per value; a quarter is left for noise."""
FRAMES_S = 10

WATCH_LONG_TASKS = """() => {
  globalThis.long_tasks = [];
  new PerformanceObserver((list) => {
    for (const entry of list.getEntries()) long_tasks.push(entry.duration);
  }).observe({ type: "longtask" });
}"""
# Apart from the CPU measurement: asking for every frame makes the main thread work for each.
WATCH_FRAMES = """() => {
  globalThis.gaps = [];
  let before = null;
  const frame = (now) => {
    if (before !== null) gaps.push(now - before);
    before = now;
    requestAnimationFrame(frame);
  };
  requestAnimationFrame(frame);
}"""


@dataclass(frozen=True, kw_only=True, slots=True)
class Plan:
    """How long and how often to measure."""

    lengths: tuple[int, ...] = (600, 60_000, 1_000_000)
    settle_s: float = 10
    window_s: float = 30
    frames_s: float = FRAMES_S
    clicks: int = 40
    openings: int = 7


QUICK = Plan(lengths=(600, 1_000_000), settle_s=3, window_s=6, frames_s=3, clicks=5, openings=3)


@dataclass
class Wire:
    """Counts the polls' answers as the browser's network stack sees them."""

    requests: set[str] = field(default_factory=set)
    json_bytes: int = 0
    wire_bytes: int = 0
    answers: int = 0

    def watch(self, cdp: CDPSession) -> None:
        """Begin counting; `wire` is with headers and compression, `json` the decoded body."""
        # No slots: Playwright notes its wrapped handlers on the object.
        cdp.on("Network.requestWillBeSent", self._asked)
        cdp.on("Network.dataReceived", self._received)
        cdp.on("Network.loadingFinished", self._finished)
        cdp.send("Network.enable")

    def _asked(self, event: dict[str, Any]) -> None:
        if "/api/series" in event["request"]["url"]:
            self.requests.add(event["requestId"])

    def _received(self, event: dict[str, Any]) -> None:
        if event["requestId"] in self.requests:
            self.json_bytes += event["dataLength"]

    def _finished(self, event: dict[str, Any]) -> None:
        if event["requestId"] in self.requests:
            self.answers += 1
            self.wire_bytes += event["encodedDataLength"]


def measure_length(server: Server, browser: Browser, steps: int, plan: Plan) -> dict[str, Any]:
    """Open a live run of `steps` steps in a new tab and measure it."""
    folder = server.runs / f"benchmark-{steps}"
    say(f"{steps} steps: writing")
    with _live_run(folder, steps):
        page = browser.new_page(viewport=VIEWPORT)
        idle = _idle_share(server, plan)
        say(f"{steps} steps: opening, settling")
        began = time.monotonic()
        page.goto(f"{server.url}/?run={folder.name}")
        serving.await_charts(page)
        opened_s = time.monotonic() - began
        page.wait_for_timeout(plan.settle_s * 1000)
        say(f"{steps} steps: measuring")
        found = _measure_page(server, page, idle, plan)
        page.close()
    return {"steps": steps, "open_s": opened_s, "server_idle_share": idle, **found}


def measure_opening(
    server: Server, browser: Browser, empty_url: str, plan: Plan
) -> dict[str, list[float]]:
    """Return seconds from the address to an empty page, the charts, and those of a second tab.

    Each round has a fresh browser profile for the empty page and for the charts.
    """
    folder = server.runs / "benchmark-opening"
    found: dict[str, list[float]] = {"empty": [], "charts": [], "second_tab": []}
    with _live_run(folder, 60_000):
        for number in range(plan.openings):
            say(f"opening: round {number + 1}")
            with browser.new_context(viewport=VIEWPORT) as context:
                page, began = context.new_page(), time.monotonic()
                page.goto(empty_url)
                page.get_by_role("heading", name="Empty").wait_for()
                found["empty"].append(time.monotonic() - began)
            with browser.new_context(viewport=VIEWPORT) as context:
                for name in ("charts", "second_tab"):
                    page, began = context.new_page(), time.monotonic()
                    page.goto(f"{server.url}/?run={folder.name}")
                    serving.await_charts(page)
                    found[name].append(time.monotonic() - began)
                    page.close()
                    time.sleep(1)
    return found


def _idle_share(server: Server, plan: Plan) -> float:
    """Return the share of a core that the server takes with no tab open."""
    time.sleep(1)
    before, began = cpu_seconds(server.process), time.monotonic()
    time.sleep(plan.window_s / 2)
    return (cpu_seconds(server.process) - before) / (time.monotonic() - began)


def _measure_page(server: Server, page: Page, idle: float, plan: Plan) -> dict[str, Any]:
    cdp = page.context.new_cdp_session(page)
    cdp.send("Performance.enable")
    wire = Wire()
    wire.watch(cdp)
    page.evaluate(WATCH_LONG_TASKS)
    cpu, main, began = cpu_seconds(server.process), _main_thread_s(cdp), time.monotonic()
    page.wait_for_timeout(plan.window_s * 1000)
    seconds, polls = time.monotonic() - began, max(1, wire.answers)
    main_s = _main_thread_s(cdp) - main
    cpu_s = cpu_seconds(server.process) - cpu - idle * seconds
    found = {
        "polls": wire.answers,
        "polls_per_s": wire.answers / seconds,
        "server_cpu_ms_per_poll": 1000 * cpu_s / polls,
        "json_bytes_per_poll": wire.json_bytes / polls,
        "wire_bytes_per_poll": wire.wire_bytes / polls,
        "client_main_ms_per_poll": 1000 * main_s / polls,
        "client_main_share": main_s / seconds,
    }
    page.evaluate(WATCH_FRAMES)
    page.wait_for_timeout(plan.frames_s * 1000)
    return {**found, **_smoothness(page)}


def _main_thread_s(cdp: CDPSession) -> float:
    metrics = cdp.send("Performance.getMetrics")["metrics"]
    return float(next(each["value"] for each in metrics if each["name"] == "TaskDuration"))


def _smoothness(page: Page) -> dict[str, Any]:
    tasks, gaps = page.evaluate("() => long_tasks"), page.evaluate("() => gaps")
    return {
        "long_tasks": len(tasks),
        "longest_task_ms": max(tasks, default=None),
        "frame_gap_p99_ms": quantile(gaps, 0.99),
        "frames_per_s": 1000 * len(gaps) / sum(gaps) if gaps else None,
    }


@contextmanager
def _live_run(folder: Path, steps: int) -> Iterator[None]:
    """Have another process write a run and go on with it."""
    command = [sys.executable, "-m", "benchmarks.recorded_run", str(folder), str(steps)]
    writer = subprocess.Popen(command, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert writer.stdin is not None
    assert writer.stdout is not None
    try:
        if writer.stdout.readline() != b"ready\n":
            raise SystemExit("The run could not be written.")
        yield
    finally:
        writer.stdin.close()
        writer.wait(30)
        writer.stdout.close()


def growth(lengths: list[dict[str, Any]]) -> dict[str, float]:
    """Return each value of the longest run over that of the shortest."""
    names = ("server_cpu_ms_per_poll", "json_bytes_per_poll", "client_main_ms_per_poll")
    first, last = lengths[0], lengths[-1]
    return {name: last[name] / first[name] for name in names if first[name] > 0}


def targets(
    lengths: list[dict[str, Any]], clicks: dict[str, Any], opening: dict[str, list[float]]
) -> dict[str, Any]:
    """Hold the worst of all lengths against what is promised."""

    def worst(name: str) -> float:
        return float(max(length[name] for length in lengths))

    step_ms = clicks["step_ms"] or 0.0
    open_s, empty_s = statistics.median(opening["charts"]), statistics.median(opening["empty"])
    return {
        "server_cpu_ms_per_poll": at_most(worst("server_cpu_ms_per_poll"), SERVER_CPU_MS),
        "json_bytes_per_poll": at_most(worst("json_bytes_per_poll"), POLL_BYTES),
        "client_main_share": at_most(worst("client_main_share"), CLIENT_SHARE),
        "tasks_over_50_ms": at_most(worst("long_tasks"), 0),
        "open_s": at_most(open_s, empty_s + OPENING_S),
        "growth": at_most(max(growth(lengths).values()), GROWTH),
        "click_answered_p95_ms": at_most(clicks["answered_ms"]["p95"], ANSWERED_P95_MS),
        "click_acknowledged_p95_ms": at_most(
            clicks["acknowledged_ms"]["p95"], ACKNOWLEDGED_MS + step_ms
        ),
    }


def measure(plan: Plan) -> dict[str, Any]:
    """Measure every length and the clicks on one server; return the report's values."""
    with (
        tempfile.TemporaryDirectory() as folder,
        serving.serve(Path(folder)) as server,
        serving.chromium() as browser,
    ):
        page = browser.new_page()  # torch and all modules are loaded by the first visit
        page.goto(server.url)
        page.get_by_role("button", name="Start run", exact=True).wait_for(timeout=60_000)
        page.close()
        lengths = [measure_length(server, browser, steps, plan) for steps in plan.lengths]
        with serving.serve_empty_page(Path(folder) / "empty") as url:
            opening = measure_opening(server, browser, url, plan)
        clicks = measure_clicks(server, browser, plan.clicks, plan.settle_s)
        memory = psutil.Process(server.process.pid).memory_info().rss
    return {
        "lengths": lengths,
        "growth": growth(lengths),
        "opening_s": opening,
        "clicks": clicks,
        "server_rss_mib": memory / 2**20,
        "targets": targets(lengths, clicks, opening),
    }


def main() -> None:
    """Measure and print one JSON object last."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="a smoke run of under a minute")
    parser.add_argument("--wait-quiet", type=float, default=0, metavar="SECONDS")
    args = parser.parse_args()
    report.wait_for_quiet(args.wait_quiet)
    load = os.getloadavg()[0]
    report.report(
        "live_page", {"quick": args.quick}, load, measure(QUICK if args.quick else Plan())
    )


if __name__ == "__main__":
    main()
