"""Is a slow rank named, and only then? Delays planted in real torchrun jobs of four gloo ranks.

    python -m benchmarks.stragglers [--runs 20] [--quick]

Each job is `straggler_script.py` under `stepscope watch`, with a delay of 5, 10 or 20 % of the step
in the input, forward, backward or optimizer of one rank, another rank each time, or with none.
Then `stepscope diagnose RUN --json` is read: `right` is the rank and the phase, `wrong` another
one, `none` no finding of kind straggler. Targets: right in 19 of 20 jobs at 10 and 20 % of each
phase, no finding in 19 of 20 without a delay.

Steps sleep, as for a device, so that four ranks can share two cores: the numbers show whether a
slow rank is distinguished from chance, not how ranks that compute disturb each other. A job takes
some 12 s on a quiet machine with two cores: 260 jobs some 55 min; --quick 2 min.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.peers.environment import environment
from benchmarks.report import at_least, report, say, wait_for_quiet
from benchmarks.straggler_script import PHASES

RANKS = 4
DELAYS = (0.05, 0.1, 0.2)
RIGHT_FROM = 0.1
"""Delay from which the rank has to be named."""
ENOUGH = 19 / 20
SCRIPT = Path(__file__).with_name("straggler_script.py")
TIMEOUT_S = 300
NOTHING = "none"


@dataclass(frozen=True, slots=True)
class Planted:
    """What one job has: the phase `none` is no delay."""

    phase: str
    delay: float
    rank: int

    @property
    def name(self) -> str:
        """How the report calls all jobs like this."""
        return NOTHING if self.phase == NOTHING else f"{self.phase} {self.delay:.0%}"

    def arguments(self, steps: int) -> list[str]:
        """Return what the script is given."""
        return [
            *("--phase", self.phase, "--rank", str(self.rank)),
            *("--delay", str(self.delay), "--steps", str(steps)),
        ]


def jobs(runs: int, delays: Sequence[float]) -> Iterator[Planted]:
    """Return every job, the cases in turn, so that a busy hour hits all of them alike."""
    for number in range(runs):
        yield Planted(NOTHING, 0.0, 0)
        for place, phase in enumerate(PHASES):
            for delay in delays:
                yield Planted(phase, delay, (number + place) % RANKS)


def straggler_of(planted: Planted, steps: int, home: Path) -> dict[str, Any] | None:
    """Run a job under `stepscope watch`; return the finding of kind straggler, if there is one."""
    _torchrun(["-m", "stepscope.watch", str(SCRIPT), *planted.arguments(steps)], home)
    (folder,) = (home / "runs").iterdir()
    command = [sys.executable, "-m", "stepscope.cli", "diagnose", str(folder), "--json"]
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=TIMEOUT_S, check=True, env=_environ(home)
    )
    found = [one for one in json.loads(done.stdout) if one["kind"] == "straggler"]
    if not found and done.stderr:
        say(done.stderr.strip())
    return found[0] if found else None


def compared(planted: Planted, found: dict[str, Any] | None) -> str:
    """Return whether a finding is right, wrong or none."""
    if found is None:
        return "none"
    same = (found["rank"], found["phase"]) == (planted.rank, planted.phase)
    return "right" if same and planted.phase != NOTHING else "wrong"


def measure(runs: int, delays: Sequence[float], steps: int) -> dict[str, Any]:
    """Run all jobs; return the counts of right, wrong and none, and the targets."""
    counts: dict[str, Counter[str]] = {}
    shares: dict[str, list[float]] = {}
    slowest_s = 0.0
    began = time.monotonic()
    planned = list(jobs(runs, delays))
    for number, planted in enumerate(planned):
        start = time.monotonic()
        with tempfile.TemporaryDirectory() as name:
            found = straggler_of(planted, steps, Path(name))
        result = compared(planted, found)
        counts.setdefault(planted.name, Counter())[result] += 1
        if found is not None:
            shares.setdefault(planted.name, []).append(found["share"])
        slowest_s = max(slowest_s, time.monotonic() - start)
        say(f"{number + 1} of {len(planned)}: {planted.name}, rank {planted.rank}: {result}")
    return {
        "targets": targets(counts),
        "counts": {name: dict(one) for name, one in counts.items()},
        "shares": {name: sum(found) / len(found) for name, found in shares.items()},
        "slowest_job_s": slowest_s,
        "minutes": (time.monotonic() - began) / 60,
    }


def targets(counts: dict[str, Counter[str]]) -> dict[str, Any]:
    """Hold what was counted against the promise."""
    held = {}
    for name, one in counts.items():
        wanted = "none" if name == NOTHING else "right"
        share = one[wanted] / one.total()
        must = name == NOTHING or float(name.split()[1].rstrip("%")) >= 100 * RIGHT_FROM
        if must:
            held[f"{name}: {wanted}"] = at_least(share, ENOUGH)
        elif one["wrong"]:  # below it, saying nothing is right too, and another rank never is
            held[f"{name}: not wrong"] = at_least(1 - one["wrong"] / one.total(), ENOUGH)
    return held


def _torchrun(arguments: Sequence[str], home: Path) -> None:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    with subprocess.Popen(
        [*command, f"--nproc-per-node={RANKS}", *arguments],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        env=_environ(home),
    ) as job:
        try:
            _, told = job.communicate(timeout=TIMEOUT_S)
        except subprocess.TimeoutExpired:
            job.terminate()  # torchrun then ends its ranks
            _, told = job.communicate()
        if job.returncode:
            raise SystemExit(f"The job failed:\n{told[-2000:]}")


def _environ(home: Path) -> dict[str, str]:
    return environment(home) | {"STEPSCOPE_RUNS": str(home / "runs")}


def main() -> None:
    """Measure and print one JSON object last."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--runs", type=int, default=20, help="jobs of each case")
    parser.add_argument("--steps", type=int, default=120, help="steps of a job")
    parser.add_argument(
        "--quick", action="store_true", help="a smoke run: one job of each at 10 %%"
    )
    parser.add_argument("--wait-quiet", type=float, default=0, metavar="SECONDS")
    options = parser.parse_args()
    runs = 1 if options.quick else options.runs
    delays = (0.1,) if options.quick else DELAYS
    wait_for_quiet(options.wait_quiet)
    load = os.getloadavg()[0]
    facts = {"runs": runs, "delays": delays, "steps": options.steps, "ranks": RANKS}
    report("stragglers", facts, load, measure(runs, delays, options.steps))


if __name__ == "__main__":
    main()
