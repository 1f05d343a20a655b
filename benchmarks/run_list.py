"""Polls of the list of runs in a folder with many: wall and CPU time of `RunIndex`.

The page of each tab polls twice a second. Live runs belong to a process that sleeps, so that every
poll reads their run.json and looks for the process, as for runs of other programs.

    python -m benchmarks.run_list [--finished 10000] [--live 1000] [--polls 40]
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil

from benchmarks.report import at_most, quantile, report, say
from dashboard.run_index import RunIndex
from stepscope.cli import main as stepscope
from stepscope.run import process_identity, write_run_json
from stepscope.run.folder import folder_name

DAY_S = 86_400.0


def make_runs(root: Path, finished: int, live: int, process: psutil.Process) -> None:
    """Write run folders with a run.json each; the live ones are the newest."""
    now = time.time()
    writer = process_identity(process.pid)
    for number in range(finished + live):
        ended = now - (finished + live - number) * DAY_S / 100
        folder = root / folder_name(ended, "run", f"{number:08x}")
        folder.mkdir()
        about = {"created": ended, "heartbeat": ended, "name": f"run {number}", "step": number}
        about |= {"status": "finished", "ended": ended + 60, "config": {"lr": 0.1, "width": 64}}
        if number >= finished:
            about |= {"status": "running", "ended": None, "heartbeat": now}
        write_run_json(folder, writer | about, durable=False)


def timed(call: Callable[[], object], times: int) -> dict[str, Any]:
    """Return wall and CPU milliseconds of calls."""
    wall, cpu = [], []
    for _ in range(times):
        began, used = time.perf_counter(), time.process_time()
        call()
        wall.append(1e3 * (time.perf_counter() - began))
        cpu.append(1e3 * (time.process_time() - used))
    return {"wall_ms": statistics.median(wall), "wall_p99_ms": quantile(wall, 0.99)} | {
        "cpu_ms": statistics.median(cpu)
    }


def main() -> None:
    """Measure and print the report."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--finished", type=int, default=10_000)
    parser.add_argument("--live", type=int, default=1_000)
    parser.add_argument("--polls", type=int, default=40)
    options = parser.parse_args()
    load = os.getloadavg()[0]
    with tempfile.TemporaryDirectory() as name, subprocess.Popen(["sleep", "3600"]) as process:
        root = Path(name) / "runs"
        root.mkdir()
        say(f"writing {options.finished + options.live:,} run folders")
        make_runs(root, options.finished, options.live, psutil.Process(process.pid))
        time.sleep(3)  # recent modification times are not trusted
        index = RunIndex(root)
        found = {"first": timed(index.fresh, 1), "poll": timed(index.fresh, options.polls)}

        def added() -> None:
            (root / f"new-{time.monotonic_ns()}").mkdir()
            index.fresh()

        found["poll_after_a_change"] = timed(added, options.polls)
        listed = index.fresh().runs
        os.environ["STEPSCOPE_RUNS"] = str(root)
        sys.stdout = open(os.devnull, "w")  # noqa: SIM115 - of the two commands
        found["stepscope_runs"] = timed(lambda: stepscope(["runs"]), 1)
        found["stepscope_gc"] = timed(lambda: stepscope(["gc", "--keep-days", "1", "--dry-run"]), 1)
        sys.stdout = sys.__stdout__
        process.kill()
    results: dict[str, Any] = {
        **found,
        "listed": len(listed),
        "listed_live": sum(run.status.live for run in listed),
        # 5% of a core at two polls a second, which all tabs share.
        "targets": {"poll_cpu_ms": at_most(found["poll"]["cpu_ms"], 25.0)},
    }
    report("run_list", vars(options), load, results)


if __name__ == "__main__":
    main()
