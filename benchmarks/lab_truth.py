"""Does the lab find what is there, and only that? Whole sweeps with planted effects, counted.

    python -m benchmarks.lab_truth [--sweeps 20] [--steps 600] [--keep DIR]

Each sweep compares two settings of `lab_truth_workload.py` with its baseline, through the whole
machinery: processes, recorder, statistics. A step of `delayed` takes 5 % longer, so its true effect
is 1 / 1.05 − 1 = −4.8 %. `no_op` changes nothing. Over each sweep the machine seems to become up to
6 % slower. Targets: the delay is found, with its size inside the interval, in 18 of 20 sweeps; the
no-op is called different in at most 1 of 20. A sweep takes a minute or more on a quiet machine.
"""

from __future__ import annotations

import argparse
import os
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

from benchmarks.lab_truth_workload import DELAY, DRIFT_FOLDER
from benchmarks.report import at_least, at_most, report, say, wait_for_quiet
from stepscope.lab.plan import Variant
from stepscope.lab.sweep_runner import SweepRunner
from stepscope.lab.trial_process import TrialProcess
from trainer.config import Workload, defaults
from trainer.custom_workload import choose
from trainer.devices import list_devices
from trainer.lab.plan import WorkloadPlan

TRUTH = 1 / (1 + DELAY) - 1
FOUND_AT_LEAST, DIFFERENT_AT_MOST = 18 / 20, 1 / 20
DIFFERENT = ("faster", "slower")
WORKLOAD = Path(__file__).with_name("lab_truth_workload.py")


def sweep(folder: Path, steps: int, number: int) -> dict[str, Any]:
    """Run one sweep in a new folder; return its sweep.json."""
    folder.mkdir(parents=True)
    os.environ[DRIFT_FOLDER] = str(folder)
    variants = tuple(
        Variant(name=name, label=name, changes={"custom_options": name})
        for name in ("delayed", "no_op")
    )
    plan = WorkloadPlan(
        config=defaults(Workload.CUSTOM),
        devices=list_devices(),
        variants=variants,
        steps=steps,
        warmup=steps // 4,
        find_best=False,
        seed=1000 * number,
    )
    process = TrialProcess("trainer.lab.trial_run", folder)
    return SweepRunner(folder, plan, process).run()


def judged(found: dict[str, Any]) -> dict[str, Any]:
    """Return what one sweep said of the planted effects."""
    if found["status"] != "finished":
        raise SystemExit(f"The sweep {found['status']}: {found['reason']}")
    delayed, no_op = found["variants"]
    inside = delayed["low"] is not None and delayed["low"] <= TRUTH <= delayed["high"]
    return {
        "delay": delayed["text"],
        "delay_found": delayed["verdict"] == "slower" and inside,
        "no_op": no_op["text"],
        "no_op_different": no_op["verdict"] in DIFFERENT,
        "drift_seen": found["drift"] is not None and found["drift"]["p"] < 0.05,
        "samples": found["progress"]["done"],
    }


def measure(sweeps: int, steps: int, root: Path) -> dict[str, Any]:
    """Run the sweeps and count."""
    results, began = [], time.monotonic()
    for number in range(sweeps):
        results.append(judged(sweep(root / f"{number:02}", steps, number)))
        say(f"sweep {number + 1} of {sweeps}: {results[-1]}")
    took = time.monotonic() - began
    found = sum(one["delay_found"] for one in results)
    different = sum(one["no_op_different"] for one in results)
    return {
        "targets": {
            "delay_found_share": at_least(found / sweeps, FOUND_AT_LEAST),
            "no_op_different_share": at_most(different / sweeps, DIFFERENT_AT_MOST),
        },
        "delay_found": found,
        "no_op_different": different,
        "drift_seen": sum(one["drift_seen"] for one in results),
        "samples_a_sweep": statistics.median(one["samples"] for one in results),
        "seconds_a_sweep": took / sweeps,
        "sweeps": results,
    }


def main() -> None:
    """Measure and print one JSON object last."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--sweeps", type=int, default=20)
    parser.add_argument("--steps", type=int, default=600, help="measured steps a sample")
    parser.add_argument("--keep", type=Path, help="keep the sweeps' folders in this new folder")
    parser.add_argument("--wait", type=float, default=300.0, help="seconds to wait for quiet")
    options = parser.parse_args()
    choose(f"{WORKLOAD}:build")
    wait_for_quiet(options.wait)
    load = os.getloadavg()[0]
    with tempfile.TemporaryDirectory() as folder:
        root = options.keep or Path(folder)
        results = measure(options.sweeps, options.steps, root)
    report("lab_truth", {"sweeps": options.sweeps, "steps": options.steps}, load, results)


if __name__ == "__main__":
    main()
