"""How much the dashboard slows training down: steps/s of the digits CNN against a bare loop.

    python -m benchmarks.interference [--quick] [--placement pinned|free|both] [--rounds 6]

Four ways in interleaved rounds: a bare loop in a process of its own; the thread runner with no tab;
the thread runner with one tab that polls twice a second; the process runner with one tab. A second
bare window closes each round: its ratio to the first is the noise. What is not being measured is
suspended (SIGSTOP), so that each way has the machine to itself.

Steps/s is steps / sum of step times, so validation, epoch ends and checkpoints are left out of all
ways alike; `wall` counts everything that happened in the window.
`pinned`: training and server share core 0, the browser has the others, so the figure is the cost of
the page and not of a browser on the same core. `free`: the scheduler decides.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from playwright.sync_api import Browser, Page

from benchmarks import report, serving
from benchmarks.pairs import interval
from benchmarks.report import at_least, say
from benchmarks.serving import ROOT, VIEWPORT, Server, children_on
from stepscope.metrics import Stream
from stepscope.store import StoreReader

THREAD_TARGET, PROCESS_TARGET = 0.95, 0.97
THREADS = max(1, (os.cpu_count() or 1) // 2)
WARM_S = 1.5
FLUSHED_S = 0.6
WAYS = ("thread_no_tab", "thread_one_tab", "process_one_tab")


@dataclass(frozen=True, kw_only=True, slots=True)
class Plan:
    """How long and how often to measure."""

    rounds: int = 6
    window_s: float = 8
    settle_s: float = 4  # after a tab is opened


@dataclass(frozen=True, slots=True)
class Rate:
    """Steps/s inside the steps, and with everything between them."""

    inside: float
    wall: float


@dataclass(frozen=True, slots=True)
class Cores:
    """Where processes run; None is everywhere."""

    training: Sequence[int] | None = None
    browser: Sequence[int] | None = None


class Bare:
    """The bare loop in its own process, asleep unless measured."""

    def __init__(self) -> None:
        command = [sys.executable, "-m", "benchmarks.bare_loop", str(THREADS)]
        self._process = subprocess.Popen(
            command, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )

    def measure(self, seconds: float) -> Rate:
        """Warm up, then train for `seconds`."""
        self._train(WARM_S)
        found = self._train(seconds)
        return Rate(found["steps_per_s"], found["wall_steps_per_s"])

    def close(self) -> None:
        """End the process."""
        self._process.communicate(timeout=30)

    def _train(self, seconds: float) -> dict[str, float]:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        print(seconds, file=self._process.stdin, flush=True)
        found: dict[str, float] = json.loads(self._process.stdout.readline())
        return found


@contextmanager
def awake(server: Server) -> Iterator[None]:
    """Let a suspended server and its training process run."""
    processes = [server.process, *server.process.children(recursive=True)]
    for process in processes:
        process.resume()
    try:
        yield
    finally:
        for process in processes:
            process.suspend()


def measure_run(server: Server, page: Page | None, plan: Plan) -> Rate:
    """Measure the server's run, with the page open on it or without any tab."""
    with awake(server):
        if page is not None:
            page.goto(f"{server.url}/?run={server.run_folder().name}")
            serving.await_charts(page)
            page.wait_for_timeout(plan.settle_s * 1000)
        time.sleep(WARM_S)
        polls = 0 if page is None else serving.polls(page)
        began = time.time()
        _rest(page, plan.window_s)
        ended = time.time()
        if page is not None:
            if serving.polls(page) - polls < plan.window_s:
                say("WARNING: the tab polled less than once a second")
            page.goto("about:blank")
        time.sleep(FLUSHED_S)
        return _rate(server.run_folder(), began, ended)


def _rest(page: Page | None, seconds: float) -> None:
    # Playwright's own messages must be taken while the tab is open.
    if page is None:
        time.sleep(seconds)
    else:
        page.wait_for_timeout(seconds * 1000)


def _rate(folder: Path, began: float, ended: float) -> Rate:
    """Return the rate of the steps recorded between two times (epoch seconds)."""
    with StoreReader(folder) as reader:
        (steps,) = [info for info in reader.series() if info.stream == Stream.STEPS]
        start, stop = reader.rows_between(steps.id, "time", began, ended)
        block = reader.read(steps.id, start, stop, 1)
    times = block.mean[block.keys.index("perf/step_time")]
    times = times[~np.isnan(times)]  # the rows of validation have none
    return Rate(len(times) / float(times.sum()), len(times) / (ended - began))


@contextmanager
def running(folder: Path, browser: Browser, runner: str) -> Iterator[Server]:
    """Start a server with a run under way, suspended."""
    with serving.serve(folder / runner) as server:
        page = browser.new_page(viewport=VIEWPORT)
        config = f"?epochs=100000&threads={THREADS}&runner={runner}"
        serving.start_run(page, f"{server.url}/{config}")
        page.close()
        with awake(server):
            time.sleep(WARM_S)
        try:
            yield server
        finally:
            for process in [server.process, *server.process.children(recursive=True)]:
                process.resume()


def measure_rounds(plan: Plan, cores: Cores) -> list[dict[str, Rate]]:
    """Return the rates of each round by way."""
    with tempfile.TemporaryDirectory() as name, children_on(cores.browser):
        folder = Path(name)
        with (
            serving.chromium() as browser,
            children_on(cores.training),
            running(folder, browser, "thread") as thread,
            running(folder, browser, "process") as process,
        ):
            bare, page = Bare(), browser.new_page(viewport=VIEWPORT)
            rounds = []
            for number in range(plan.rounds):
                found = {
                    "bare": bare.measure(plan.window_s),
                    "thread_no_tab": measure_run(thread, None, plan),
                    "thread_one_tab": measure_run(thread, page, plan),
                    "process_one_tab": measure_run(process, page, plan),
                    "bare_again": bare.measure(plan.window_s),
                }
                rates = ", ".join(f"{way} {rate.inside:.1f}" for way, rate in found.items())
                say(f"round {number + 1} of {plan.rounds}: {rates} steps/s")
                rounds.append(found)
            bare.close()
    return rounds


def placement(name: str) -> Cores | None:
    """Return the cores of a placement; None where this machine has too few."""
    if name == "free":
        return Cores()
    cores = sorted(os.sched_getaffinity(0))
    return Cores(cores[:1], cores[1:]) if len(cores) > 1 else None


def summary(rounds: list[dict[str, Rate]]) -> dict[str, Any]:
    """Return medians, and the ratios to bare with their 95 % intervals."""
    rates = {way: _median([found[way].inside for found in rounds]) for way in rounds[0]}
    wall = {way: _median([found[way].wall for found in rounds]) for way in rounds[0]}
    return {
        "steps_per_s": rates,
        "wall_steps_per_s": wall,
        "ratio_to_bare": {way: _ratio(rounds, way, "inside") for way in WAYS},
        "wall_ratio_to_bare": {way: _ratio(rounds, way, "wall") for way in WAYS},
        "bare_to_bare": _interval(
            [found["bare_again"].inside / found["bare"].inside for found in rounds]
        ),
    }


def _ratio(rounds: list[dict[str, Rate]], way: str, field: str) -> dict[str, Any]:
    return _interval(
        [
            2
            * getattr(found[way], field)
            / (getattr(found["bare"], field) + getattr(found["bare_again"], field))
            for found in rounds
        ]
    )


def _interval(ratios: list[float]) -> dict[str, Any]:
    """Return the median with its bootstrap interval over rounds."""
    return interval(ratios) | {"rounds": ratios}


def _median(values: list[float]) -> float:
    return float(np.median(values))


def targets(results: dict[str, Any]) -> dict[str, Any]:
    """Hold the ratios against what is promised: pinned where it was measured, else free."""
    ratios = results["pinned" if "pinned" in results else "free"]["ratio_to_bare"]
    return {
        "thread_one_tab": at_least(ratios["thread_one_tab"]["median"], THREAD_TARGET),
        "process_one_tab": at_least(ratios["process_one_tab"]["median"], PROCESS_TARGET),
    }


def measure(names: Sequence[str], plan: Plan) -> dict[str, Any]:
    """Measure each placement; return the report's values."""
    results: dict[str, Any] = {}
    for name in names:
        cores = placement(name)
        if cores is None:
            raise SystemExit("pinned: needs two cores. Use --placement free.")
        say(f"{name}: starting two servers, a browser and a bare loop")
        results[name] = summary(measure_rounds(plan, cores))
    return {"threads": THREADS, **results, "targets": targets(results)}


def main() -> None:
    """Measure and print one JSON object last."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="a smoke run of about a minute")
    parser.add_argument("--placement", choices=["pinned", "free", "both"], default="both")
    parser.add_argument("--rounds", type=int, default=Plan().rounds)
    parser.add_argument("--wait-quiet", type=float, default=0, metavar="SECONDS")
    args = parser.parse_args()
    plan = Plan(rounds=1, window_s=3, settle_s=1) if args.quick else Plan(rounds=args.rounds)
    chosen = "pinned" if args.quick and args.placement == "both" else args.placement
    report.wait_for_quiet(args.wait_quiet)
    load = os.getloadavg()[0]
    names = ["pinned", "free"] if chosen == "both" else [chosen]
    options = {"quick": args.quick, "placement": chosen, "rounds": plan.rounds}
    report.report("interference", options, load, measure(names, plan))


if __name__ == "__main__":
    main()
