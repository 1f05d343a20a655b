"""What reading all GPUs ten times a second costs, for one GPU and for eight.

    python -m benchmarks.sampler [--quick] [--no-peers] [--rounds 5] [--wait-quiet SECONDS]

Stepscope's sampler (its thread at 10 Hz, all tiers, processes, recording) beside nvitop's snapshot
of all devices and gpustat's query, each called ten times a second. Rounds are interleaved, a fresh
process each. NVML is the simulator's (simulator/, compiled here with gcc), which answers from
memory: a driver's own time is not in the numbers. Two processes are on each GPU.
"""

from __future__ import annotations

import argparse
import ctypes
import importlib
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks import report
from benchmarks.child import ChildError, call
from benchmarks.peers.environment import SAMPLERS, Peers, prepare, without
from benchmarks.report import at_most, say
from stepscope.run import RunStatus
from stepscope.session.sampler import Sampler
from stepscope.store.recorder import Recorder
from tests.simulator.nvml_library import INCLUDE, build

OURS = "stepscope"
GPUS = (1, 8)
RATE_HZ = 10
SHARE = 0.5
"""Percent of a core that sampling eight GPUs may take."""
CHILD_S = 180.0
PERIOD_S = 1 / RATE_HZ
WARM_S = 1.0


@dataclass(frozen=True, kw_only=True, slots=True)
class Plan:
    """How often and how long to measure."""

    rounds: int = 5
    seconds: float = 10.0


def measure_once(
    python: Path, library: Path, name: str, gpus: int, seconds: float
) -> dict[str, float]:
    """Return what one sampler costs in a process of its own. Raises ChildError."""
    with tempfile.TemporaryDirectory() as folder:
        home = Path(folder)
        simulated = {
            "LD_PRELOAD": str(library),
            "CUDASIM": "0",
            "CUDASIM_SHM": str(home / "shared"),
            "CUDASIM_DEVICES": str(gpus),
            "CUDASIM_NVML": f"pcie_bytes 1e11;process {os.getpid()} 500;process 1 300",
        }
        found: dict[str, float] = call(
            python, sample, name, seconds, home=home, timeout_s=CHILD_S, variables=simulated
        )
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
                    one = measure_once(python, library, name, gpus, plan.seconds)
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


class TickRecorder(Recorder):
    """A recorder that also keeps how long each tick of the sampler took."""

    costs: list[float]

    def sample(self, values: Mapping[str, float | None]) -> None:
        self.costs.append(values.get("sampler/cost") or 0.0)
        super().sample(values)


def sample_ours(seconds: float) -> dict[str, float]:
    """Run the sampler's thread over a recorder that writes; count its thread alone, and all."""
    with tempfile.TemporaryDirectory() as folder:
        recorder = TickRecorder(Path(folder), name="sampler")
        recorder.costs = []
        sampler = Sampler(recorder, allocator_index=None, period_s=PERIOD_S)
        sampler.start()
        assert sampler._thread.ident is not None
        clock = time.pthread_getcpuclockid(sampler._thread.ident)
        time.sleep(WARM_S)
        calls_before = nvml_calls()
        thread_before, process_before = time.clock_gettime(clock), time.process_time()
        recorder.costs.clear()
        time.sleep(seconds)
        ticks = len(recorder.costs)
        thread_s = time.clock_gettime(clock) - thread_before
        process_s = time.process_time() - process_before
        calls = nvml_calls() - calls_before
        sampler.stop()
        recorder.close(RunStatus.FINISHED)
    return {
        "ticks": ticks,
        "cpu_s": thread_s / ticks,
        "with_writing_s": process_s / ticks,
        "wall_s": sum(recorder.costs) / ticks,
        "calls": calls / ticks,
    }


def sample_peer(look: Callable[[], Any], seconds: float) -> dict[str, float]:
    """Call `look` ten times a second, or as often as it can; count the CPU of the process."""
    deadline = time.monotonic()
    begin = deadline + WARM_S
    end = begin + seconds
    cpu_s = wall_s = 0.0
    ticks = calls = 0
    while deadline < end:
        before = time.perf_counter(), time.process_time(), nvml_calls()
        look()
        if deadline >= begin:
            wall_s += time.perf_counter() - before[0]
            cpu_s += time.process_time() - before[1]
            calls += nvml_calls() - before[2]
            ticks += 1
        deadline = max(deadline + PERIOD_S, time.monotonic())
        time.sleep(max(0.0, deadline - time.monotonic()))
    return {
        "ticks": ticks,
        "cpu_s": cpu_s / ticks,
        "wall_s": wall_s / ticks,
        "calls": calls / ticks,
    }


def nvitop() -> Callable[[], Any]:
    """Return nvitop's snapshot of all GPUs."""
    devices = importlib.import_module("nvitop").Device.all()
    return lambda: [device.as_snapshot() for device in devices]


def gpustat() -> Callable[[], Any]:
    """Return gpustat's query of all GPUs."""
    module = importlib.import_module("gpustat")
    return lambda: module.new_query()


def nvml_calls() -> int:
    """Return the calls of NVML by this process, if its library counts them; else 0."""
    try:
        count = ctypes.CDLL("libnvidia-ml.so.1").cudasim_nvml_counts
    except (OSError, AttributeError):
        return 0
    count.restype = ctypes.c_char_p
    return sum(json.loads(count()).values())


def sample(name: str, seconds: float) -> dict[str, float]:
    """Return CPU and wall seconds and NVML calls of a tick, in a child process."""
    if name == OURS:
        return sample_ours(seconds)
    peers = {"nvitop": nvitop, "gpustat": gpustat}
    return sample_peer(peers[name](), seconds)


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
