"""Why did memory run out? Five scripts on simulated GPUs of sizes around their known peak.

    .venv-cudasim/bin/python -m benchmarks.oom_sweep --out FOLDER [--only NAME] [--judge]

Needs the simulator (simulator/). Each script runs once on a large device, which tells the peaks
of allocated and reserved memory up to every step: the truth. Then it runs under `stepscope watch`
on devices of `FACTORS` times its whole peak, besides what a context takes. What is right:

- Too big, the optimizer's state or growth where a step's tensors alone are more than the device
  has.
- Fragmentation where the pieces are planted and the tensors would fit.
- Where the tensors would fit, but not with what the allocator rounds up and leaves free also on the
  large device, both: too big with the remark on pieces, or fragmentation after a whole step.

FOLDER keeps each report of a failure; `--judge` judges those again, without running anything.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from benchmarks.oom_scripts import NAMES, PLANTED
from benchmarks.report import at_least, at_most, report, say
from stepscope.memory.oom.classify import OomCause, judge
from stepscope.memory.oom.record import parse
from stepscope.run import run_folders

MIB = 2**20
FACTORS = (0.5, 0.65, 0.8, 0.9, 0.95, 0.98, 1.0, 1.03, 1.08)
PLANTED_FACTORS = (0.6, 0.8, 0.95, 1.14, 1.17, 1.2, 1.23, 1.26)
"""The last ones leave enough for the pieces, and not for a step beside them."""
TAKEN = (64 + 8) * MIB
"""What the simulator's context and driver take of a device."""
SCRIPT = Path(__file__).with_name("oom_scripts.py")
NO_PIECES = (OomCause.TOO_BIG, OomCause.OPTIMIZER, OomCause.GROWTH)


def run(name: str, size: int, folder: Path, *, watched: bool) -> str:
    """Run a script on a device of `size` bytes; return what it printed."""
    folder.mkdir(parents=True, exist_ok=True)
    env = os.environ | {
        "CUDASIM_MEMORY": str(size),
        "CUDASIM_CONTEXT_MIB": "64",
        "CUDASIM_MAX_FLOPS": "1000000",
        "CUDASIM_SHM": str(folder / "shm"),
        "PYTHONPATH": str(SCRIPT.parents[1]),
        "STEPSCOPE_RUNS": str(folder / "runs"),
    }
    with_watch = ["-m", "stepscope.watch"] if watched else []
    command = [sys.executable, *with_watch, str(SCRIPT), name]
    return subprocess.run(
        command, env=env, capture_output=True, text=True, check=False, cwd=folder
    ).stdout


def sweep(name: str, out: Path) -> None:
    """Run one script on all sizes, and keep the truth and the reports of its failures."""
    peaks = json.loads(run(name, 12 * 2**30, out / name, watched=False).strip().splitlines()[-1])
    (out / f"{name}.json").write_text(json.dumps(peaks), encoding="utf-8")
    for factor in PLANTED_FACTORS if name == PLANTED else FACTORS:
        folder = out / name / f"{factor}"
        run(name, int(factor * peaks[-1][0]) + TAKEN, folder, watched=True)
        reports = [one / "oom.json" for one in run_folders(folder / "runs")]
        failed = [path for path in reports if path.exists()]
        for path in failed:
            (out / f"{name} {factor}.json").write_bytes(path.read_bytes())
        say(f"{name} {factor}: {'failed' if failed else 'went through'}")


def judged(out: Path) -> list[dict[str, Any]]:
    """Return each failure with its truth and its verdict."""
    found = []
    for path in sorted(out.glob("* *.json")):
        name, _, factor = path.stem.partition(" ")
        peaks = json.loads((out / f"{name}.json").read_text(encoding="utf-8"))
        last = parse(path.read_bytes()).last
        steps, usable = last.steps_done or 0, int(float(factor) * peaks[-1][0])
        allocated, reserved = peaks[min(steps, len(peaks) - 1)]
        verdict = judge(last)
        pieces = verdict.case is OomCause.FRAGMENTATION
        demand = (last.allocated or 0) + (last.requested or 0)  # rounded as the allocator does
        if max(allocated, demand) > usable:
            truth, right = "too big", verdict.case in NO_PIECES
        elif name == PLANTED:
            truth, right = "fragmentation", pieces
        elif reserved > usable:
            remark = any("ALLOC_CONF" in (step.code or "") for step in verdict.next)
            truth, right = "both", (pieces and steps > 0) or remark
        else:
            truth, right = "fits", pieces
        found.append(
            {
                "script": name,
                "factor": float(factor),
                "steps": steps,
                "phase": last.phase,
                "truth": truth,
                "case": verdict.case.name,
                "right": right,
            }
        )
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--only", choices=NAMES)
    parser.add_argument("--judge", action="store_true")
    options = parser.parse_args()
    for name in () if options.judge else [options.only] if options.only else NAMES:
        sweep(name, options.out.absolute())
    found = judged(options.out)
    for one in found:
        say(f"{'' if one['right'] else 'WRONG '}{one}")
    right = sum(one["right"] for one in found) / len(found) if found else None
    first = [
        one for one in found if one["case"] == OomCause.FRAGMENTATION.name and not one["steps"]
    ]
    targets = {"right": at_least(right, 0.95), "fragmentation at step 1": at_most(len(first), 0)}
    results = {"failures": found, "targets": targets}
    report("oom_sweep", {"only": options.only}, os.getloadavg()[0], results)


if __name__ == "__main__":
    main()
