"""How long a chart of a long run takes: first view, zoom and the newest rows, at any length.

    python -m benchmarks.reader [--quick] [--no-peers] [--wait-quiet SECONDS]

Runs of 10^5, 10^6 and 10^7 steps with four metrics, each read in a fresh process, files in the page
cache: the answer to a page that has just been opened (`page`), to a zoom into a random 1 %
(`page_zoom`), the store's share of both (`chart`, `zoom`), the newest 1000 rows, and the memory
above the imports. Beside it trackio's and TensorBoard's own readers, which load a run as a whole.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks import report
from benchmarks.peers.adapters import OURS
from benchmarks.peers.environment import Peers, environment, last_line, prepare, without
from benchmarks.report import at_most, say

READS = ("page", "page_zoom", "chart", "zoom")
PEERS = ("trackio", "tensorboard")
PAGE_MS, INCREMENTAL_MS, PEAK_MB, GROWTH = 10.0, 1.0, 20.0, 1.5
PEER_BUDGET_S = 100.0
"""A peer's longer run is left out when it would take longer than this."""
CHILD_TIMEOUT_S = 300


@dataclass(frozen=True, kw_only=True, slots=True)
class Plan:
    """The lengths of our runs and the peers', and the fresh processes per value."""

    steps: tuple[int, ...] = (100_000, 1_000_000, 10_000_000)
    peer_steps: tuple[int, ...] = (100_000, 1_000_000)
    rounds: int = 7
    peer_rounds: int = 3


class ChildError(Exception):
    """A child that failed; the message is the last line of what it said."""


def child(
    peers: Peers, folder: Path, module: str, *args: str, timeout_s: float = CHILD_TIMEOUT_S
) -> dict[str, Any]:
    """Run a child to its end; return its result. Raises ChildError."""
    try:
        done = subprocess.run(
            [str(peers.python), "-m", f"benchmarks.{module}", *args],
            cwd=folder,
            env=environment(folder),
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=timeout_s,
        )
    except subprocess.TimeoutExpired as error:
        raise ChildError(f"no end in {timeout_s:g} s") from error
    if done.returncode != 0:
        raise ChildError(last_line(done.stderr))
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def measure_run(
    peers: Peers, name: str, steps: int, whats: Sequence[str], rounds: int
) -> dict[str, Any]:
    """Write a run of this length, read it in fresh processes; return the medians."""
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        data = folder / "data"
        data.mkdir()
        written = child(peers, folder, "long_runs", name, str(data), str(steps))
        found: dict[str, list[dict[str, Any]]] = {what: [] for what in whats}
        for _ in range(rounds):
            for what in whats:
                found[what].append(
                    child(peers, folder, "reading_child", name, what, str(data), str(steps))
                )
        newest = child(peers, folder, "reading_child", name, "incremental", str(data), str(steps))
    result = {what: summary(reads) for what, reads in found.items()}
    result |= {"incremental": newest, "write_s": written["seconds"]}
    say(
        f"{name}, {steps} steps: "
        + ", ".join(f"{what} {result[what]['ms']:.2f} ms" for what in (*whats, "incremental"))
    )
    return result


def summary(reads: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Return the medians of reads in fresh processes, and the slowest."""
    times = [read["ms"] for read in reads]
    return {
        "ms": median(times),
        "slowest_ms": max(times),
        "peak_mb": median(read["peak_mb"] for read in reads),
        "points": reads[0]["points"],
    }


def measure_peer(peers: Peers, name: str, plan: Plan) -> dict[str, Any]:
    """Measure a peer's runs, shortest first, up to the one that takes too long."""
    found: dict[str, Any] = {}
    steps_before, spent_s = 0, 0.0
    for steps in plan.peer_steps:
        expected_s = spent_s * steps / steps_before if steps_before else 0.0
        if expected_s > PEER_BUDGET_S:
            found[str(steps)] = {"skipped": f"would take {expected_s:.0f} s to write and read"}
            continue
        try:
            result = measure_run(peers, name, steps, ["chart"], plan.peer_rounds)
        except ChildError as error:
            say(f"{name} failed: {error}")
            return found | {"failed": str(error)}
        found[str(steps)] = result
        # Each fresh process reads once, the incremental one four times.
        spent_s = result["write_s"] + 1e-3 * result["chart"]["ms"] * (plan.peer_rounds + 4)
        steps_before = steps
    return found


def measure(peers: Peers, plan: Plan) -> dict[str, Any]:
    """Measure every length, and the peers; return the report's values."""
    ours = {str(steps): measure_run(peers, OURS, steps, READS, plan.rounds) for steps in plan.steps}
    beside = {name: measure_peer(peers, name, plan) for name in PEERS if name in peers.versions}
    return {
        "versions": peers.versions,
        "missing": {name: why for name, why in peers.missing.items() if name in PEERS},
        "readers": {OURS: ours, **beside},
        "growth": growth(ours),
        "targets": targets(ours),
    }


def growth(ours: dict[str, Any]) -> dict[str, float]:
    """Return the time at the longest run over that at the shortest, for each read."""
    first, *_, last = ours.values()
    return {what: last[what]["ms"] / first[what]["ms"] for what in (*READS, "incremental")}


def targets(ours: dict[str, Any]) -> dict[str, Any]:
    """Hold the slowest length against what is promised."""
    grown = growth(ours)

    def most(what: str, value: str = "ms") -> float:
        return float(max(found[what][value] for found in ours.values()))

    return {
        "page_ms": at_most(most("page"), PAGE_MS),
        "page_zoom_ms": at_most(most("page_zoom"), PAGE_MS),
        "page_growth": at_most(grown["page"], GROWTH),
        "page_zoom_growth": at_most(grown["page_zoom"], GROWTH),
        "incremental_ms": at_most(most("incremental"), INCREMENTAL_MS),
        "peak_mb": at_most(max(most(what, "peak_mb") for what in READS), PEAK_MB),
    }


def main() -> None:
    """Measure and print one JSON object last."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="a smoke run of about a minute")
    parser.add_argument("--no-peers", action="store_true", help="Stepscope alone")
    parser.add_argument("--wait-quiet", type=float, default=0, metavar="SECONDS")
    args = parser.parse_args()
    quick = Plan(steps=(10_000, 100_000), peer_steps=(10_000,), rounds=2, peer_rounds=1)
    plan = quick if args.quick else Plan()
    peers = without("left out (--no-peers)") if args.no_peers else prepare()
    report.wait_for_quiet(args.wait_quiet)
    load = os.getloadavg()[0]
    options = {"quick": args.quick, "peers": not args.no_peers, "rounds": plan.rounds}
    report.report("reader", options, load, measure(peers, plan))


if __name__ == "__main__":
    main()
