"""How long a chart of a long run takes: first view, zoom and the newest rows, at any length.

    python -m benchmarks.reader [--quick] [--no-peers] [--wait-quiet SECONDS]

Runs of 10^5, 10^6 and 10^7 steps with four metrics, each read in a fresh process, files in the page
cache: the answer to a page that has just been opened (`page`), to a zoom into a random 1 %
(`page_zoom`), the store's share of both (`chart`, `zoom`), the newest 1000 rows, and the memory
above the imports. Beside it trackio's and TensorBoard's own readers, which load a run as a whole.
"""

from __future__ import annotations

import argparse
import os
import random
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks import report
from benchmarks.child import ChildError, call
from benchmarks.long_runs import KEYS, write_run
from benchmarks.peers.adapters import OURS, PROJECT
from benchmarks.peers.environment import Peers, prepare, without
from benchmarks.report import at_most, say
from dashboard.charts import series
from stepscope.common.metrics import Stream
from stepscope.run import read_run
from stepscope.store import StoreReader
from stepscope.store.final_values import bucket_for

READS = ("page", "page_zoom", "chart", "zoom", "newest")
PEERS = {"trackio": (100_000, 1_000_000), "tensorboard": (100_000,)}
"""The lengths of the peers' runs: TensorBoard's reader would take over a minute for more."""
PAGE_MS = 10.0
NEWEST_MS = 1.0
PEAK_MB = 20.0
GROWTH = 1.5
CHILD_S = 300.0
NEW_ROWS = 1_000
REPEATS = 50
WINDOW = 0.01
"""Share of the steps in a zoom."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Plan:
    """The lengths of our runs, the longest of a peer, and the fresh processes per value."""

    steps: tuple[int, ...] = (100_000, 1_000_000, 10_000_000)
    most_peer_steps: int = 1_000_000
    rounds: int = 7
    peer_rounds: int = 3


def measure_run(
    peers: Peers, name: str, steps: int, reads: Sequence[str], rounds: int
) -> dict[str, Any]:
    """Write a run of this length, read it in fresh processes; return the medians."""
    found: dict[str, list[dict[str, Any]]] = {read: [] for read in reads}
    with tempfile.TemporaryDirectory() as temporary:
        home = Path(temporary)
        data = home / "data"
        data.mkdir()
        write_s = call(
            peers.python, write_run, name, str(data), steps, home=home, timeout_s=CHILD_S
        )
        for _ in range(rounds):
            for read in reads:
                result = call(
                    peers.python, measure_read, name, read, str(data), steps,
                    home=home, timeout_s=CHILD_S,
                )  # fmt: skip
                found[read].append(result)
    medians = {read: summary(results) for read, results in found.items()}
    times = ", ".join(f"{read} {one['ms']:.2f} ms" for read, one in medians.items())
    say(f"{name}, {steps} steps: {times}")
    return {**medians, "write_s": write_s}


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
    """Measure the first chart of a peer's runs, shortest first."""
    found: dict[str, Any] = {}
    for steps in (min(steps, plan.most_peer_steps) for steps in PEERS[name]):
        try:
            found[str(steps)] = measure_run(peers, name, steps, ["chart"], plan.peer_rounds)
        except ChildError as error:
            say(f"{name} failed: {error}")
            return found | {"failed": str(error)}
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
    return {what: last[what]["ms"] / first[what]["ms"] for what in READS}


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
        "newest_ms": at_most(most("newest"), NEWEST_MS),
        "peak_mb": at_most(max(most(what, "peak_mb") for what in READS), PEAK_MB),
    }


def chart(folder: Path, _steps: int) -> int:
    """Open the run, find its steps, read them in 500 buckets at most."""
    with StoreReader(folder) as reader:
        (info,) = [info for info in reader.series() if info.stream == Stream.STEPS]
        return len(reader.read(info.id, 0, info.rows, bucket_for(info.rows, series.TARGET)))


def zoom(folder: Path, steps: int) -> int:
    """Open the run, find a window's rows, read them in 500 buckets at most."""
    low, high = random_window(steps)
    with StoreReader(folder) as reader:
        (info,) = [info for info in reader.series() if info.stream == Stream.STEPS]
        start, stop = reader.rows_between(info.id, "step", low, high)
        return len(reader.read(info.id, start, stop, bucket_for(stop - start, series.TARGET)))


def page(folder: Path, _steps: int) -> int:
    """Return what a page gets that has just been opened."""
    run = read_run(folder)
    with StoreReader(folder) as reader:
        return len(series.update(reader, run, {}, 0)["series"]["steps"]["s"])


def page_zoom(folder: Path, steps: int) -> int:
    """Return what a page gets for a window."""
    run, (low, high) = read_run(folder), random_window(steps)
    with StoreReader(folder) as reader:
        return len(series.window(reader, run, "step", low, high)["steps"]["s"])


def random_window(steps: int) -> tuple[float, float]:
    """Return the first and last step of a random window."""
    low = random.randrange(int(steps * (1 - WINDOW)))
    return low, low + steps * WINDOW - 1


def read_trackio(_folder: Path, _steps: int) -> int:
    """Return all rows: trackio reads a run as a whole, for a chart and for a window of it."""
    storage = import_module("trackio.sqlite_storage").SQLiteStorage
    return len(storage.get_logs(PROJECT, "run"))


def read_tensorboard(folder: Path, _steps: int) -> int:
    """Return the points of one metric; the accumulator always loads the whole file."""
    module = import_module("tensorboard.backend.event_processing.event_accumulator")
    events = module.EventAccumulator(str(folder), size_guidance={"scalars": 0})
    events.Reload()
    return len(events.Scalars(KEYS[0]))


def newest(folder: Path, _steps: int) -> int:
    """Read the newest rows as a page does at each poll: open, find, read, close."""
    with StoreReader(folder) as reader:
        (info,) = [info for info in reader.series() if info.stream == Stream.STEPS]
        return len(reader.read(info.id, info.rows - NEW_ROWS, info.rows, 1))


Read = Callable[[Path, int], int]
READ: dict[tuple[str, str], Read] = {
    (OURS, "chart"): chart,
    (OURS, "zoom"): zoom,
    (OURS, "page"): page,
    (OURS, "page_zoom"): page_zoom,
    (OURS, "newest"): newest,
    ("trackio", "chart"): read_trackio,
    ("tensorboard", "chart"): read_tensorboard,
}
"""The reads of each recorder; each returns the points that it has read."""
IMPORTS = {
    "trackio": "trackio.sqlite_storage",
    "tensorboard": "tensorboard.backend.event_processing.event_accumulator",
}


def measure_read(name: str, read: str, data: str, steps: int) -> dict[str, Any]:
    """Return milliseconds, points and memory of one read, in a child process.

    The newest rows are read again and again: a server that polls is warm.
    """
    if name in IMPORTS:
        import_module(IMPORTS[name])
    repeats = REPEATS if read == "newest" else 1
    found = [measured(lambda: READ[name, read](Path(data), steps)) for _ in range(repeats)]
    return found[-1] | {"ms": median(one["ms"] for one in found)}


def peak_bytes() -> int:
    """Return the highest resident memory since the last `reset_peak`."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("VmHWM:"):
            return int(line.split()[1]) * 1024
    raise OSError("no VmHWM in /proc/self/status")


def reset_peak() -> None:
    """Let the peak begin anew at what is resident now: imports have higher ones."""
    Path("/proc/self/clear_refs").write_text("5")


def measured(read: Callable[[], Any]) -> dict[str, Any]:
    """Call once; return what it returned as `points`, its milliseconds and its memory."""
    reset_peak()
    before, began = peak_bytes(), time.perf_counter()
    points = read()
    ms = 1e3 * (time.perf_counter() - began)
    return {"ms": ms, "points": points, "peak_mb": (peak_bytes() - before) / 1e6}


def main() -> None:
    """Measure and print one JSON object last."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="a smoke run of about a minute")
    parser.add_argument("--no-peers", action="store_true", help="Stepscope alone")
    parser.add_argument("--wait-quiet", type=float, default=0, metavar="SECONDS")
    args = parser.parse_args()
    quick = Plan(steps=(10_000, 100_000), most_peer_steps=10_000, rounds=2, peer_rounds=1)
    plan = quick if args.quick else Plan()
    peers = without("left out (--no-peers)") if args.no_peers else prepare()
    report.wait_for_quiet(args.wait_quiet)
    load = os.getloadavg()[0]
    options = {"quick": args.quick, "peers": not args.no_peers, "rounds": plan.rounds}
    report.report("reader", options, load, measure(peers, plan))


if __name__ == "__main__":
    main()
