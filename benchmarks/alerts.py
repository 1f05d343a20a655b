"""What alerts cost a run: the writer thread's time for a second of rows and one look at all rules.

python -m benchmarks.alerts
"""

from __future__ import annotations

import os
import statistics
import time
from pathlib import Path

import numpy as np

from benchmarks import report
from stepscope.alerts.monitor import AlertMonitor
from stepscope.alerts.settings import AlertSettings
from stepscope.store import SeriesBlock
from stepscope.store.blocks import Sample

SECONDS = 300
TICKS = 10
CASES = ((0, 10), (1, 10), (1, 1000), (8, 1000))
"""GPUs and steps a second."""
TARGET = 0.001
"""Share of a core."""
STEP_KEYS = ("train/loss", "perf/step_time", "perf/samples_per_sec", "train/lr")
PROCESS = dict.fromkeys(
    (
        "memory/allocated",
        "memory/reserved",
        "memory/alloc_retries",
        "process/rss",
        "process/cpu",
        "sampler/cost",
    ),
    1.0,
)
DEVICE = dict.fromkeys(
    (
        "gpu/util",
        "gpu/mem_used",
        "gpu/mem_total",
        "gpu/temp",
        "gpu/power",
        "gpu/throttle_reasons",
        "gpu/sm_clock",
    ),
    1.0,
)


def cost_s(gpus: int, steps: int) -> float:
    """Return the median CPU seconds for one second of a run, flushed twice, and one look."""
    watch = AlertMonitor(AlertSettings(path=Path("alerts.toml")), Path("run"))
    uuids = [f"GPU-{number}" for number in range(gpus)]
    run_json = {
        "status": "running",
        "kind": "init",
        "device": "GPU-0",
        "devices": [{"uuid": uuid, "name": "GPU"} for uuid in uuids],
    }
    half = [Sample("samples", "", 0.0, 0, PROCESS)] * (TICKS // 2)
    half += [Sample("devices", uuid, 0.0, 0, DEVICE) for uuid in uuids] * (TICKS // 2)
    axis = np.arange(max(1, steps // 2), dtype=float)
    block = SeriesBlock.raw(STEP_KEYS, axis, axis, np.ones((len(STEP_KEYS), len(axis))))
    times = []
    for second in range(SECONDS):
        began = time.thread_time()
        watch.add(block, half)
        watch.add(block, half)
        watch.check(run_json, second, None, None)
        times.append(time.thread_time() - began)
    return statistics.median(times)


def main() -> None:
    """Measure and print one JSON object last."""
    load = os.getloadavg()[0]
    costs = {}
    for gpus, steps in CASES:
        cost = cost_s(gpus, steps)
        costs[f"{gpus} GPUs, {steps} steps/s"] = {"us_a_second": 1e6 * cost, "core": cost}
        report.say(f"{gpus} GPUs, {steps} steps/s: {1e6 * cost:.0f} us a second")
    worst = max(cost["core"] for cost in costs.values())
    results = {"costs": costs, "targets": {"core": report.at_most(worst, TARGET)}}
    report.report("alerts", {}, load, results)


if __name__ == "__main__":
    main()
