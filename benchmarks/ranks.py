"""What the ranks of a job cost: reading them, each answer of `/api/ranks`, and watching a rank.

    python -m benchmarks.ranks [--quick] [--no-watch] [--wait-quiet SECONDS]

Reading: for jobs of 1, 2, 16 and 64 ranks with a short and a long past, which go on at 25 steps/s
in another process, the CPU time of reading all ranks for the Ranks tab, and of an answer with its
JSON.

Watching: a DDP script of two ranks with steps of 10 ms, under torchrun, bare and under
`stepscope watch` in turn. Each pair gives the ratio of the two median step times.
"""

from __future__ import annotations

import argparse
import functools
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
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks import report
from benchmarks.pairs import interval
from benchmarks.report import at_most, quantile, say
from benchmarks.serving import ROOT
from dashboard.ranks.job_ranks import JobRanks, ranks_answer, read_job
from stepscope.run import RunInfo, read_run

ANSWER_MS = 10
ANSWER_BYTES = 60_000
WATCH_RATIO = 1.01
PACE_S = 1.0
SCRIPT = Path(__file__).with_name("ddp_steps.py")


@dataclass(frozen=True, kw_only=True, slots=True)
class Plan:
    """The jobs (ranks, steps of their past), how often each is read, and the pairs of watching."""

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


def core_ms(work: Callable[[], Any]) -> tuple[float, Any]:
    """Return milliseconds of the core, and the result."""
    began = time.thread_time()
    found = work()
    return 1e3 * (time.thread_time() - began), found


def measure_job(ranks: int, steps: int, polls: int) -> dict[str, Any]:
    """Read a live job of this size."""
    say(f"{ranks} ranks, {steps} steps: writing")
    reads, answers, sizes = [], [], []
    with (
        tempfile.TemporaryDirectory() as root,
        live_job(Path(root) / "job", ranks, steps) as folder,
    ):
        say(f"{ranks} ranks, {steps} steps: reading")
        read_job(read_run(folder))  # imports, and code that runs for the first time
        for _ in range(polls):
            time.sleep(PACE_S)
            run = read_run(folder)
            read, job = core_ms(functools.partial(read_job, run))
            answer, text = core_ms(functools.partial(answer_text, job, run))
            reads.append(read)
            answers.append(answer)
            sizes.append(len(text))
    found = {
        "ranks": ranks,
        "steps": steps,
        "read_core_ms": costs(reads),
        "answer_core_ms": costs(answers),
        "answer_bytes": max(sizes),
    }
    say(f"{ranks} ranks, {steps} steps: {found}")
    return found


def answer_text(job: JobRanks, run: RunInfo) -> str:
    """Answer what a tab asks, as the route sends it."""
    answer = ranks_answer(job, run, "", "time")
    return json.dumps(answer, separators=(",", ":"), allow_nan=False)


def costs(values_ms: list[float]) -> dict[str, float | None]:
    """Return the median and the 95th percentile."""
    return {"median": statistics.median(values_ms), "p95": quantile(values_ms, 0.95)}


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
        "answer_core_p95_ms": at_most(max(job["answer_core_ms"]["p95"] for job in jobs), ANSWER_MS),
        "answer_bytes": at_most(max(job["answer_bytes"] for job in jobs), ANSWER_BYTES),
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
