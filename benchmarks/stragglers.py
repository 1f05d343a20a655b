"""Is a slow rank named, and only then? Delays planted in real torchrun jobs of four gloo ranks.

    python -m benchmarks.stragglers [--runs 20] [--quick] [--no-peers]

Each job is `straggler_script.py` under `stepscope watch`, with a delay of 5, 10 or 20 % of the step
in the input, forward, backward or optimizer of one rank, another rank each time, or with none.
After it `stepscope diagnose RUN --json` is asked: `right` is the rank and the phase, `wrong`
another one, `none` no finding of kind straggler. Targets: right in 19 of 20 jobs at 10 and 20 % of
each phase, no finding in 19 of 20 without a delay. Beside it TraceML, where it can be installed, on
jobs of its own with the same delays: it knows the phases input and compute.

Steps sleep, as for a device, so that four ranks can share two cores: the numbers say whether a slow
rank is told from chance, not how ranks that compute disturb each other. A job takes some 12 s on a
quiet machine with two cores: 260 jobs some 55 min, with TraceML's 104 more 80 min; --quick 2 min.
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

from benchmarks.peers.environment import STRAGGLERS, Peers, environment, prepare, without
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
TRACEML = "traceml-ai"
TRACEML_KINDS = {
    "INPUT_STRAGGLER": ("input",),
    "COMPUTE_STRAGGLER": ("forward", "backward", "optimizer"),
}
"""The phases that TraceML's kinds stand for; its plain STRAGGLER names a rank without a phase."""


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


def ours(planted: Planted, steps: int, home: Path) -> dict[str, Any] | None:
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


def judged(planted: Planted, found: dict[str, Any] | None) -> str:
    """Say whether a finding is right, wrong or none."""
    if found is None:
        return "none"
    same = (found["rank"], found["phase"]) == (planted.rank, planted.phase)
    return "right" if same and planted.phase != NOTHING else "wrong"


def traceml(planted: Planted, steps: int, home: Path, python: Path) -> dict[str, Any]:
    """Run a job under TraceML; return the diagnosis of its summary."""
    # Its command starts torchrun by itself, so a rank's own number is all that is the same.
    command = [
        *(str(python.with_name("traceml")), "run", str(SCRIPT), "--nproc-per-node", str(RANKS)),
        *("--mode", "summary", "--logs-dir", str(home / "logs")),
        *("--args", "--traceml", *planted.arguments(steps)),
    ]
    subprocess.run(
        command, capture_output=True, timeout=TIMEOUT_S, check=True, env=environment(home), cwd=home
    )
    (summary,) = (home / "logs").glob("*/final_summary.json")
    diagnosis: dict[str, Any] = json.loads(summary.read_text())["primary_diagnosis"]
    return diagnosis


def judged_traceml(planted: Planted, diagnosis: dict[str, Any]) -> str:
    """Say whether TraceML's diagnosis is right, wrong, only the rank, or none."""
    kind = diagnosis["kind"]
    if "STRAGGLER" not in kind:
        return "none"
    named = diagnosis.get("evidence", {}).get("worst", {}).get("rank")
    if planted.phase == NOTHING or named not in (None, planted.rank):
        return "wrong"
    if kind not in TRACEML_KINDS:
        return "rank only"
    return "right" if planted.phase in TRACEML_KINDS[kind] else "wrong"


def measure(runs: int, delays: Sequence[float], steps: int, peers: Peers) -> dict[str, Any]:
    """Run all jobs and count."""
    counts: dict[str, Counter[str]] = {}
    theirs: dict[str, Counter[str]] = {}
    shares: dict[str, list[float]] = {}
    slowest, began = 0.0, time.monotonic()
    planned = list(jobs(runs, delays))
    for number, planted in enumerate(planned):
        start = time.monotonic()
        with tempfile.TemporaryDirectory() as name:
            found = ours(planted, steps, Path(name))
        counts.setdefault(planted.name, Counter())[judged(planted, found)] += 1
        if found is not None:
            shares.setdefault(planted.name, []).append(found["share"])
        slowest = max(slowest, time.monotonic() - start)
        said = judged(planted, found)
        if TRACEML in peers.versions and number < len(planned) * 2 / 5:
            with tempfile.TemporaryDirectory() as name:
                diagnosis = traceml(planted, steps, Path(name), peers.python)
            answer = judged_traceml(planted, diagnosis)
            theirs.setdefault(planted.name, Counter())[answer] += 1
            said += f", TraceML {answer} ({diagnosis['kind']})"
        say(f"{number + 1} of {len(planned)}: {planted.name}, rank {planted.rank}: {said}")
    return {
        "targets": targets(counts),
        "ours": {name: dict(one) for name, one in counts.items()},
        "shares": {name: sum(found) / len(found) for name, found in shares.items()},
        TRACEML: {name: dict(one) for name, one in theirs.items()},
        "missing": peers.missing,
        "slowest_job_s": slowest,
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
    parser.add_argument("--no-peers", action="store_true", help="Stepscope alone")
    parser.add_argument("--wait-quiet", type=float, default=0, metavar="SECONDS")
    options = parser.parse_args()
    runs, delays = (1, (0.1,)) if options.quick else (options.runs, DELAYS)
    alone = options.no_peers or options.quick
    peers = without("left out", STRAGGLERS) if alone else prepare(STRAGGLERS)
    wait_for_quiet(options.wait_quiet)
    load = os.getloadavg()[0]
    facts = {"runs": runs, "delays": delays, "steps": options.steps, "ranks": RANKS}
    report("stragglers", facts, load, measure(runs, delays, options.steps, peers))


if __name__ == "__main__":
    main()
