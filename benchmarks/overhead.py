"""How much a recorder slows training down: steps/s of a real step, against a bare loop.

    python -m benchmarks.overhead [--device cpu|cuda] [--placement pinned|free] [--quick]
                                  [--step-ms 0.8]

The same script (overhead_script.py) runs bare, with `stepscope.init` and `rec.step`, unchanged
under `stepscope watch`, with trackio and with TensorBoard, each in a process of its own; a second
bare process shows the noise. The processes train in turn, in blocks of 0.15 s. Those that wait are
moved to the other cores, so that their threads (sampler, writer) run at their own pace but not in
somebody else's block. A block is compared to the bare ones before and after it: 200 such pairs, in
four sets of fresh processes (two processes of one program differ by some percent). Ratios are of
seconds: 1.01 is one percent slower. Beside them those of CPU seconds, all threads of the process
together, which other work on the machine hardly moves.

`pinned`: the process that trains has one core for all its threads, so that whatever a recorder does
in the background counts in full. `free`: it may use every core, as most trainings do.
"""

from __future__ import annotations

import argparse
import os
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks import report
from benchmarks.pairs import AGAIN, BARE, interval, order, ratios
from benchmarks.peers.adapters import OURS
from benchmarks.peers.environment import Peers, prepare, without
from benchmarks.report import at_most, say
from benchmarks.trainees import WATCH, Cores, Trainee, take_turns, trainees

TARGETS = {OURS: 1.01, WATCH: 1.02}
PEERS = ("trackio", "tensorboard")
STEP_MS = 0.8
"""The least on a GPU is what its kernels take to launch: about 1 ms."""
SAME = 0.005
"""How far the second bare process may be from the first for the ratios to say anything."""
SETTLE_STEPS = 200
"""Before the first block: enough for every recorder's first flush."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Plan:
    """Pairs of each way, in how many sets of processes, and the seconds of a block."""

    rounds: int = 200
    sets: int = 4
    block_s: float = 0.15


@dataclass(frozen=True, slots=True)
class Set:
    """The blocks of one set of processes: way and seconds, way and CPU seconds."""

    steps: int
    seconds: list[tuple[str, float]]
    cpu: list[tuple[str, float]]


def fitting_width(python: Path, core: int, device: str, step_ms: float) -> int:
    """Return the width of the network whose step takes about `step_ms` here."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name) / "calibrate"
        trainee = Trainee(python, "calibrate", folder, round(1e3 * step_ms), device)
        trainee.place([core])
        width = int(trainee.answer()[0])
        trainee.close()
    return width


def measure_sets(
    peers: Peers, plan: Plan, cores: Cores, width: int, device: str, failed: dict[str, str]
) -> dict[str, Any]:
    """Measure all ways in sets of fresh processes; return what they took, alone and to bare."""
    ways = [OURS, WATCH, *(name for name in PEERS if name in peers.versions)]
    sets = []
    for number in range(plan.sets):
        with trainees(peers.python, [BARE, AGAIN, *ways], width, device, failed) as running:
            present = [way for way in ways if way in running]
            settling = take_turns(running, [BARE, AGAIN, *present], SETTLE_STEPS, cores)
            step_s = min(took[0] for _, took in settling) / SETTLE_STEPS
            steps = max(1, round(plan.block_s / step_s))
            blocks = order(present, plan.rounds // plan.sets, seed=number)
            taken = take_turns(running, blocks, steps, cores)
        sets.append(
            Set(
                steps,
                [(way, took[0]) for way, took in taken],
                [(way, took[1]) for way, took in taken],
            )
        )
        medians = ", ".join(
            f"{way} {median(found):.4f}" for way, found in ratios(sets[-1].seconds).items()
        )
        say(f"set {number + 1} of {plan.sets}, {steps} steps a block: {medians}")
    return summary(sets)


def measure(
    peers: Peers, plan: Plan, placement: str, device: str, step_ms: float
) -> dict[str, Any]:
    """Measure all ways in one placement; return the report's values."""
    cores = sorted(os.sched_getaffinity(0))
    if len(cores) < 2:
        raise SystemExit("Two cores are needed: one to train on, one for all that waits.")
    width = fitting_width(peers.python, cores[-1], device, step_ms)
    say(f"{placement}, width {width}")
    training = cores if placement == "free" else cores[-1:]
    failed: dict[str, str] = {}
    found = measure_sets(peers, plan, Cores(training, cores[:-1]), width, device, failed)
    return {
        "width": width,
        placement: found,
        "missing": peers.missing | failed,
        "versions": peers.versions,
        "targets": targets(found["seconds_to_bare"]),
    }


def targets(found: dict[str, Any]) -> dict[str, Any]:
    """Hold the ratios against the promise."""
    return {
        way: at_most(found[way]["median"] if way in found else None, limit)
        for way, limit in TARGETS.items()
    }


def summary(sets: Sequence[Set]) -> dict[str, Any]:
    """Return steps/s of each way, and its ratios to bare with their intervals."""
    step_s: dict[str, list[float]] = {}
    for one in sets:
        for way, seconds in one.seconds:
            step_s.setdefault(way, []).append(seconds / one.steps)
    to_bare = compared([ratios(one.seconds) for one in sets])
    again = to_bare[AGAIN]["median"]
    return {
        "valid": abs(again - 1) <= SAME,
        "step_ms": {way: 1e3 * median(times) for way, times in step_s.items()},
        "steps_per_s": {way: 1 / median(times) for way, times in step_s.items()},
        "seconds_to_bare": to_bare,
        "cpu_to_bare": compared([ratios(one.cpu) for one in sets]),
    }


def compared(sets: Sequence[dict[str, list[float]]]) -> dict[str, Any]:
    """Return, by way, the median of all pairs with its interval, and the median of each set."""
    found = {}
    for way in dict.fromkeys(way for one in sets for way in one):
        by_set = [one[way] for one in sets if way in one]
        pairs = [ratio for one in by_set for ratio in one]
        found[way] = interval(pairs) | {"pairs": len(pairs), "by_set": [*map(median, by_set)]}
    return found


def main() -> None:
    """Measure and print one JSON object last."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="a smoke run of about a minute")
    parser.add_argument("--no-peers", action="store_true", help="Stepscope alone")
    parser.add_argument("--placement", choices=["pinned", "free"], default="pinned")
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--rounds", type=int, default=Plan().rounds)
    parser.add_argument("--sets", type=int, default=Plan().sets, help="of fresh processes")
    parser.add_argument("--step-ms", type=float, default=STEP_MS)
    parser.add_argument("--wait-quiet", type=float, default=0, metavar="SECONDS")
    args = parser.parse_args()
    if not 1 <= args.sets <= args.rounds:
        parser.error(f"--sets: must be between 1 and --rounds, got {args.sets}.")
    plan = Plan(rounds=24, sets=1) if args.quick else Plan(rounds=args.rounds, sets=args.sets)
    peers = without("left out (--no-peers)") if args.no_peers else prepare()
    report.wait_for_quiet(args.wait_quiet)
    load = os.getloadavg()[0]
    options = {
        "quick": args.quick,
        "placement": args.placement,
        "device": args.device,
        "peers": not args.no_peers,
        "rounds": plan.rounds,
        "sets": plan.sets,
        "step_ms": args.step_ms,
    }
    found = measure(peers, plan, args.placement, args.device, args.step_ms)
    report.report("overhead", options, load, found)


if __name__ == "__main__":
    main()
