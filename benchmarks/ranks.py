"""What the ranks of a job cost: each answer of `/api/ranks`, and watching a rank.

    python -m benchmarks.ranks [--quick] [--no-watch] [--wait-quiet SECONDS]

Answers: for jobs of 1, 2, 16 and 64 ranks with a short and a long past, which go on at 25 steps/s
in another process. A tab asks as the browser does, at once while there is more and then every
second; the time is that of the whole route's work and its JSON, on the clock and of the core.
Beside it the poll of rank 0 (`/api/series`), that of one process alone among them.

Watching: a DDP script of two ranks with steps of 10 ms, under torchrun, bare and under
`stepscope watch` in turn. Each pair gives the ratio of the two median step times.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from benchmarks import report
from benchmarks.pairs import interval
from benchmarks.report import at_most, quantile, say
from benchmarks.serving import ROOT
from dashboard.api.ranks import Jobs, ranks_answer
from dashboard.charts import series
from dashboard.charts.rank_events import RankEvents
from dashboard.ranks.ranks_response import RanksRequest
from stepscope.run import read_run
from stepscope.store import StoreReader

ANSWER_MS = 10
ANSWER_BYTES = 5000
WATCH_RATIO = 1.01
PACE_S = 1.0
SCRIPT = Path(__file__).with_name("ddp_steps.py")


@dataclass(frozen=True, kw_only=True, slots=True)
class Plan:
    """The jobs (ranks, steps of their past), how long each is asked, and the pairs of watching."""

    jobs: tuple[tuple[int, int], ...] = (
        (1, 100_000),
        (2, 3_000),
        (2, 1_000_000),
        (16, 3_000),
        (16, 100_000),
        (64, 3_000),
        (64, 50_000),
    )
    polls: int = 20
    pairs: int = 9
    steps: int = 300


QUICK = Plan(jobs=((1, 3_000), (2, 3_000), (64, 3_000)), polls=5, pairs=2, steps=100)


def timed(work: Callable[[], Any]) -> tuple[float, float, Any]:
    """Return milliseconds on the clock and of the core, and the result."""
    core, clock = time.thread_time(), time.perf_counter()
    found = work()
    return 1e3 * (time.perf_counter() - clock), 1e3 * (time.thread_time() - core), found


class Tab:
    """Asks `/api/ranks` as a tab does, and notes what each answer costs."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._jobs = Jobs()
        self._question = RanksRequest()
        self.clock_ms: list[float] = []
        self.core_ms: list[float] = []
        self.bytes: list[int] = []

    def ask(self, metric: str = "", axis: str = "time") -> bool:
        """Ask once; return whether there is more."""
        question = replace(self._question, metric=metric or self._question.metric, axis=axis)

        def work() -> tuple[dict[str, Any], str]:
            answer = ranks_answer(self._jobs, self._folder, question)
            return answer, json.dumps(answer, separators=(",", ":"), allow_nan=False)

        clock, core, (answer, text) = timed(work)
        self.clock_ms.append(clock)
        self.core_ms.append(core)
        self.bytes.append(len(text))
        if "columns" in answer:
            more = bool(answer["more"])
            self._question = RanksRequest(
                answer["metric"] or "", answer["columns"], answer["seen"], answer["who"], more
            )
        return bool(answer["more"])

    def load(self, metric: str = "", axis: str = "time") -> int:
        """Ask until nothing more waits; return how many answers that took."""
        count = 1
        while self.ask(metric, axis) and count < 5_000:
            count += 1
        return count


def measure_job(ranks: int, steps: int, polls: int) -> dict[str, Any]:
    """Ask for a live job of this size."""
    say(f"{ranks} ranks, {steps} steps: writing")
    with (
        tempfile.TemporaryDirectory() as root,
        live_job(Path(root) / "job", ranks, steps) as folder,
    ):
        say(f"{ranks} ranks, {steps} steps: asking")
        Tab(folder).load()  # imports, and code that runs for the first time
        tab = Tab(folder)
        loaded = tab.load()
        switched = tab.load("train/loss")
        over_steps = tab.load("train/loss", "step")
        tab.load("train/loss")
        first = len(tab.bytes)
        series_ms = []
        events = RankEvents()
        for _ in range(polls):
            time.sleep(PACE_S)
            tab.ask()
            series_ms.append(timed(lambda: poll_series(folder, events))[1])
    steady = slice(first, None)
    found = {
        "ranks": ranks,
        "steps": steps,
        "answers_to_load": loaded,
        "answers_to_switch": switched,
        "answers_to_switch_axis": over_steps,
        "all": costs(tab.clock_ms, tab.core_ms, tab.bytes),
        "steady": costs(tab.clock_ms[steady], tab.core_ms[steady], tab.bytes[steady]),
        "series_core_ms": {
            "median": statistics.median(series_ms),
            "p95": quantile(series_ms, 0.95),
        },
    }
    say(f"{ranks} ranks, {steps} steps: {found['steady']}")
    return found


def poll_series(folder: Path, events: RankEvents) -> str:
    """Answer what the live page polls for rank 0: everything, as at its first poll."""
    run = read_run(folder)
    with StoreReader(folder) as reader:
        answer = series.update(reader, run, {}, 0)
        told, _ = events.of(run)
        answer["rank_events"] = series.rank_events(told, run)
    return json.dumps(answer, separators=(",", ":"))


def costs(clock_ms: list[float], core_ms: list[float], sizes: list[int]) -> dict[str, Any]:
    """Return medians, 95th percentiles and the largest of what answers cost."""
    return {
        "clock_ms": {"median": statistics.median(clock_ms), "p95": quantile(clock_ms, 0.95)},
        "core_ms": {"median": statistics.median(core_ms), "p95": quantile(core_ms, 0.95)},
        "bytes": {"median": statistics.median(sizes), "most": max(sizes)},
    }


@contextmanager
def live_job(folder: Path, ranks: int, steps: int) -> Iterator[Path]:
    """Have another process write a job and go on with it."""
    command = [sys.executable, "-m", "benchmarks.recorded_job", str(folder), str(ranks), str(steps)]
    writer = subprocess.Popen(command, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert writer.stdin is not None
    assert writer.stdout is not None
    try:
        if writer.stdout.readline() != b"ready\n":
            raise SystemExit("The job could not be written.")
        yield folder
    finally:
        writer.stdin.close()
        writer.wait(60)
        writer.stdout.close()


def median_step_ms(folder: Path, steps: int, *, watched: bool) -> float:
    """Train two ranks under torchrun; return the median step time that rank 0 measured itself."""
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    watch = ["-m", "stepscope.watch"] if watched else []
    done = subprocess.run(
        [sys.executable, *torchrun, *watch, str(SCRIPT), str(steps)],
        cwd=folder,
        env=os.environ
        | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "STEPSCOPE_RUNS": str(folder / "runs")},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=300,
        check=True,
    )
    found = re.search(r"median_ms=([\d.]+)", done.stdout)
    if found is None:
        raise SystemExit(f"The script said nothing: {done.stderr[-500:]}")
    return float(found[1])


def measure_watching(plan: Plan) -> dict[str, Any]:
    """Return the ratios of watched to bare steps; which of a pair comes first changes."""
    bare, watched, ratios = [], [], []
    with tempfile.TemporaryDirectory() as root:
        for pair in range(plan.pairs):
            times = {}
            for way in (False, True) if pair % 2 else (True, False):
                times[way] = median_step_ms(Path(root), plan.steps, watched=way)
            bare.append(times[False])
            watched.append(times[True])
            ratios.append(times[True] / times[False])
            say(f"watching, pair {pair + 1} of {plan.pairs}: {ratios[-1]:.4f}")
    return {
        "bare_ms": interval(bare),
        "watched_ms": interval(watched),
        "ratio": interval(ratios),
        "ratios": ratios,
    }


def targets(jobs: list[dict[str, Any]], watching: dict[str, Any] | None) -> dict[str, Any]:
    """Hold the worst of all jobs against what is promised."""
    found = {
        "answer_core_p95_ms": at_most(max(job["all"]["core_ms"]["p95"] for job in jobs), ANSWER_MS),
        "answer_clock_median_ms": at_most(
            max(job["steady"]["clock_ms"]["median"] for job in jobs), ANSWER_MS
        ),
        "answer_bytes": at_most(max(job["all"]["bytes"]["most"] for job in jobs), ANSWER_BYTES),
    }
    if watching is not None:
        found["watch_ratio"] = at_most(watching["ratio"]["median"], WATCH_RATIO)
    return found


def main() -> None:
    """Measure and print one JSON object last."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="a smoke run of about a minute")
    parser.add_argument("--no-watch", action="store_true", help="the answers alone")
    parser.add_argument("--wait-quiet", type=float, default=0, metavar="SECONDS")
    args = parser.parse_args()
    plan = QUICK if args.quick else Plan()
    report.wait_for_quiet(args.wait_quiet)
    load = os.getloadavg()[0]
    jobs = [measure_job(ranks, steps, plan.polls) for ranks, steps in plan.jobs]
    watching = None if args.no_watch else measure_watching(plan)
    results = {"jobs": jobs, "watching": watching, "targets": targets(jobs, watching)}
    report.report("ranks", {"quick": args.quick}, load, results)


if __name__ == "__main__":
    main()
