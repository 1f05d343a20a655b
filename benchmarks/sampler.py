"""What reading all GPUs ten times a second costs, for one GPU and for eight.

    python -m benchmarks.sampler [--quick] [--no-peers] [--rounds 5] [--wait-quiet SECONDS]

Stepscope's sampler (its thread at 10 Hz, all tiers, processes, recording) beside nvitop's snapshot
of all devices and gpustat's query, each called ten times a second. Rounds are interleaved, a fresh
process each. NVML is the simulator's (simulator/, compiled here with gcc), which answers from
memory: a driver's own time is not in the numbers. Two processes are on each GPU.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks import report
from benchmarks.peers.environment import SAMPLERS, Peers, environment, last_line, prepare, without
from benchmarks.report import at_most, say
from tests.simulator.nvml_library import INCLUDE, build

OURS = "stepscope"
GPUS = (1, 8)
RATE_HZ = 10
SHARE = 0.5
"""Percent of a core that sampling eight GPUs may take."""
CHILD_TIMEOUT_S = 180


@dataclass(frozen=True, kw_only=True, slots=True)
class Plan:
    """How often and how long to measure."""

    rounds: int = 5
    seconds: float = 10.0


class ChildError(Exception):
    """A sampler that failed; the message is the last line of what it said."""


def child(python: Path, library: Path, name: str, gpus: int, seconds: float) -> dict[str, float]:
    """Measure one sampler in a process of its own. Raises ChildError."""
    with tempfile.TemporaryDirectory() as home:
        simulated = {
            "LD_PRELOAD": str(library),
            "CUDASIM": "0",
            "CUDASIM_SHM": str(Path(home) / "shared"),
            "CUDASIM_DEVICES": str(gpus),
            "CUDASIM_NVML": f"pcie_bytes 1e11;process {os.getpid()} 500;process 1 300",
        }
        command = [str(python), "-m", "benchmarks.sampling_child", name, str(seconds)]
        try:
            done = subprocess.run(
                command,
                env=environment(Path(home)) | simulated,
                stdin=subprocess.DEVNULL,
                capture_output=True,
                text=True,
                timeout=CHILD_TIMEOUT_S,
            )
        except subprocess.TimeoutExpired as error:
            raise ChildError(f"no end in {CHILD_TIMEOUT_S} s") from error
    if done.returncode != 0:
        raise ChildError(last_line(done.stderr))
    found: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return found


def measure(peers: Peers, library: Path, plan: Plan) -> dict[str, Any]:
    """Run the rounds; return the samplers' figures by number of GPUs, and the targets."""
    found: dict[str, dict[int, list[dict[str, float]]]] = {}
    missing = dict(peers.missing)
    for number in range(plan.rounds):
        names = [OURS, *peers.versions]
        for name in names if number % 2 == 0 else reversed(names):
            if name in missing:
                continue
            python = Path(sys.executable) if name == OURS else peers.python
            try:
                for gpus in GPUS:
                    one = child(python, library, name, gpus, plan.seconds)
                    found.setdefault(name, {}).setdefault(gpus, []).append(one)
                    say(f"round {number + 1}: {name}, {gpus} GPUs: {1e6 * one['cpu_s']:.0f} us CPU")
            except ChildError as error:
                if name == OURS:
                    raise
                missing[name] = str(error)
    return results(found, missing, peers.versions)


def results(
    found: dict[str, dict[int, list[dict[str, float]]]],
    missing: dict[str, str],
    versions: dict[str, str],
) -> dict[str, Any]:
    """Put the rounds together: medians, ratios to ours, and whether the target is met."""
    samplers = {
        name: {str(gpus): figures(rounds) for gpus, rounds in by_gpus.items()}
        for name, by_gpus in found.items()
    }
    ours = samplers[OURS]
    ratios = {
        name: {
            gpus: one["cpu_us"] / ours[gpus]["cpu_us"]
            for gpus, one in by_gpus.items()
            if gpus in ours
        }
        for name, by_gpus in samplers.items()
        if name != OURS
    }
    most = ours[str(max(GPUS))]["core_percent_at_10_hz"]
    return {
        "driver": "simulated: answers from memory",
        "versions": versions,
        "missing": missing,
        "samplers": samplers,
        "cpu_to_ours": ratios,
        "targets": {"core_percent_of_8_gpus": at_most(most, SHARE)},
    }


def figures(rounds: Sequence[dict[str, float]]) -> dict[str, float]:
    """Return the medians over the rounds of one sampler."""
    median = {key: statistics.median(one[key] for one in rounds) for key in rounds[0]}
    cpu_us = 1e6 * median["cpu_s"]
    told = {
        "cpu_us": cpu_us,
        "cpu_us_least": 1e6 * min(one["cpu_s"] for one in rounds),
        "cpu_us_most": 1e6 * max(one["cpu_s"] for one in rounds),
        "wall_us": 1e6 * median["wall_s"],
        "nvml_calls": median["calls"],
        "core_percent_at_10_hz": 100 * RATE_HZ * median["cpu_s"],
        "ticks": median["ticks"],
    }
    if "with_writing_s" in median:
        told["with_writing_us"] = 1e6 * median["with_writing_s"]
    return told


def main() -> None:
    """Measure and report."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--quick", action="store_true", help="two short rounds")
    parser.add_argument("--no-peers", action="store_true", help="Stepscope alone")
    parser.add_argument("--wait-quiet", type=float, default=0.0, metavar="SECONDS")
    options = parser.parse_args()
    if not (INCLUDE / "nvml.h").exists():
        raise SystemExit(f"nvml.h is not in {INCLUDE}: simulator/setup.sh fetches it.")
    plan = Plan(rounds=2, seconds=3.0) if options.quick else Plan(rounds=options.rounds)
    peers = without("--no-peers", SAMPLERS) if options.no_peers else prepare(SAMPLERS)
    report.wait_for_quiet(options.wait_quiet)
    load = os.getloadavg()[0]
    with tempfile.TemporaryDirectory() as folder:
        found = measure(peers, build(Path(folder)), plan)
    report.report("sampler", vars(options), load, found)


if __name__ == "__main__":
    main()
