"""What a recorder costs a step, and what it loses when its process is killed.

    python -m benchmarks.recorder [--quick] [--no-peers] [--rounds 5] [--wait-quiet SECONDS]

Stepscope beside trackio, TensorBoard's SummaryWriter, wandb offline, aim and mlflow (see peers/),
four metrics a step, as fast as the loop can: µs a call (median, p99), CPU seconds per 10^5 steps,
bytes a point. Rounds are interleaved, a fresh process each. Then each logs 1000 steps/s and is
killed with SIGKILL after two seconds; what its own reader then finds is compared to what was
logged. The row `nothing` is an empty call: what the clock and the loop take, subtracted nowhere.
"""

from __future__ import annotations

import argparse
import ctypes
import math
import mmap
import os
import random
import resource
import signal
import statistics
import subprocess
import tempfile
import time
from array import array
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from benchmarks import report
from benchmarks.child import ChildError, call, child_command
from benchmarks.peers.adapters import METRICS, NOTHING, OURS, START, STORED, Log
from benchmarks.peers.environment import Peers, environment, last_line, prepare, without
from benchmarks.report import at_most, say

STEPS = 100_000
FEWER = {"tensorboard": 20_000, "wandb": 20_000, "aim": 5_000, "mlflow": 500}
"""Steps of the slow ones; their CPU is scaled up, their bytes counted without the empty store."""
MEDIAN_US, P99_US, CPU_S, POINT_BYTES = 1.0, 5.0, 0.5, 14.0
CHILD_S = 180.0
STARTED_S = 60.0
LIVED_S = 2.0
SURVIVORS_S = 3.0
"""How long processes that a recorder has besides the killed one may go on writing."""


RATE = 1000.0
"""Steps per second before the kill."""
STRAY_S = 10.0
"""Longest wait for processes that a recorder left behind."""
_PR_SET_CHILD_SUBREAPER = 36

Row = tuple[float, float, float, float]


@dataclass(frozen=True, kw_only=True, slots=True)
class Plan:
    """How often to measure, and the share of the steps to take."""

    rounds: int = 5
    kills: int = 3
    our_kills: int = 10
    share: float = 1.0

    def steps(self, name: str) -> int:
        """Return the steps of a round of this recorder."""
        return max(100, int(FEWER.get(name, STEPS) * self.share))

    def kills_of(self, name: str) -> int:
        """Return how often this recorder is killed."""
        return {NOTHING: 0, OURS: self.our_kills}.get(name, self.kills)


@contextmanager
def data_folder() -> Iterator[Path]:
    """Give a temporary folder with the empty folder `data` in it."""
    with tempfile.TemporaryDirectory() as name:
        (Path(name) / "data").mkdir()
        yield Path(name)


def measure_speed(peers: Peers, name: str, plan: Plan) -> dict[str, Any]:
    """Log as fast as it can in a fresh process and folder; read back what was stored."""
    with data_folder() as folder:
        data = str(folder / "data")
        found: dict[str, Any] = call(
            peers.python, log_fast, name, data, plan.steps(name), home=folder, timeout_s=CHILD_S
        )
        if name != NOTHING:
            found["stored"] = call(
                peers.python, count_stored, name, data, home=folder, timeout_s=CHILD_S
            )
    return found


def measure_kill(peers: Peers, name: str) -> dict[str, Any]:
    """Kill the recorder while it logs; return steps logged and lost."""
    with data_folder() as folder:
        data, note = str(folder / "data"), folder / "logged"
        note.write_bytes(bytes(8))
        with (folder / "output").open("wb") as output:
            process = subprocess.Popen(
                child_command(peers.python, log_until_killed, name, data, str(note)),
                cwd=folder,
                env=environment(folder),
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
            )
        with note.open("r+b") as file, mmap.mmap(file.fileno(), 8) as logged:
            try:
                lived_s = _live(process, logged)
            except ChildError as error:
                said = last_line((folder / "output").read_text(errors="replace"))
                raise ChildError(f"{error}: {said}") from error
            finally:
                process.send_signal(signal.SIGKILL)
                process.wait()
            steps = _number(logged)
        _let_survivors_end()
        read = call(peers.python, count_stored, name, data, home=folder, timeout_s=CHILD_S)
    lost = max(0, steps - read)
    return {"logged": steps, "lost": lost, "lost_s": lost * lived_s / max(1, steps)}


def summary(
    speeds: Sequence[dict[str, Any]], kills: Sequence[dict[str, Any]], empty: bool
) -> dict[str, Any]:
    """Return the medians of a recorder's rounds, and the worst of its kills.

    With `empty`, the bytes of the empty store are left out: fewer steps do not make up for them.
    """

    def middle(name: str) -> float:
        return statistics.median(float(found[name]) for found in speeds)

    steps = speeds[0]["steps"]
    points = steps * len(METRICS)
    size = middle("bytes") - (middle("empty_bytes") if empty else 0)
    return {
        "steps": steps,
        "median_us": middle("median_us"),
        "median_us_by_round": [found["median_us"] for found in speeds],
        "p99_us": middle("p99_us"),
        "p99_us_by_round": [found["p99_us"] for found in speeds],
        "max_us": max(found["max_us"] for found in speeds),
        "cpu_s_per_100k": middle("cpu_s") * 1e5 / steps,
        "finish_s": middle("finish_s"),
        "bytes_per_point": size / points,
        "live_bytes": middle("live_bytes"),
        "not_stored": max(steps - found["stored"] for found in speeds),
        "kills": len(kills),
        "lost_on_kill": max((found["lost"] for found in kills), default=None),
        "lost_on_kill_s": max((found["lost_s"] for found in kills), default=None),
        "logged_before_kill": [found["logged"] for found in kills],
    }


def measure(peers: Peers, plan: Plan) -> dict[str, Any]:
    """Measure all recorders in interleaved rounds; return the report's values."""
    names = [NOTHING, OURS, *peers.versions]
    speeds: dict[str, list[dict[str, Any]]] = {name: [] for name in names}
    kills: dict[str, list[dict[str, Any]]] = {name: [] for name in names}
    failed: dict[str, str] = {}
    for number in range(max(plan.rounds, plan.our_kills)):
        turn = number % len(names)
        for name in names[turn:] + names[:turn]:
            if name in failed:
                continue
            try:
                if number < plan.rounds:
                    speeds[name].append(measure_speed(peers, name, plan))
                    say(f"round {number + 1}: {name} {_brief(speeds[name][-1])}")
                if number < plan.kills_of(name):
                    kills[name].append(measure_kill(peers, name))
                    say(f"kill {number + 1}: {name} {kills[name][-1]}")
            except ChildError as error:
                failed[name] = str(error)
                say(f"{name} failed: {error}")
    calls = speeds.pop(NOTHING)
    found = {
        name: summary(rounds, kills[name], name in FEWER)
        for name, rounds in speeds.items()
        if rounds
    }
    return {
        "versions": peers.versions,
        "missing": peers.missing,
        "failed": failed,
        "empty_call_us": statistics.median(one["median_us"] for one in calls),
        "recorders": found,
        "targets": targets(found.get(OURS, {})),
    }


def targets(ours: dict[str, Any]) -> dict[str, Any]:
    """Hold our values against what is promised."""
    return {
        "median_us": at_most(ours.get("median_us"), MEDIAN_US),
        "p99_us": at_most(ours.get("p99_us"), P99_US),
        "cpu_s_per_100k": at_most(ours.get("cpu_s_per_100k"), CPU_S),
        "bytes_per_point": at_most(ours.get("bytes_per_point"), POINT_BYTES),
        "not_stored": at_most(ours.get("not_stored"), 0),
        "lost_on_kill": at_most(ours.get("lost_on_kill"), 0),
    }


def _live(process: subprocess.Popen[bytes], logged: mmap.mmap) -> float:
    """Wait for the first step, then as long again as is measured; return the seconds lived."""
    deadline = time.monotonic() + STARTED_S
    while not _number(logged):
        if process.poll() is not None or time.monotonic() > deadline:
            raise ChildError("logged nothing")
        time.sleep(0.01)
    # The kill falls anywhere between two flushes.
    lived_s = LIVED_S + random.random()
    time.sleep(lived_s)
    if process.poll() is not None:
        raise ChildError("ended by itself")
    return lived_s


def _number(logged: mmap.mmap) -> int:
    return memoryview(logged[:8]).cast("q")[0]


def _let_survivors_end() -> None:
    """Give processes that the killed one had started some time, then end them too."""
    survivors = psutil.Process().children(recursive=True)
    _, alive = psutil.wait_procs(survivors, timeout=SURVIVORS_S)
    for process in alive:
        process.kill()
    psutil.wait_procs(alive, timeout=SURVIVORS_S)


def _brief(found: dict[str, Any]) -> str:
    return (
        f"{found['median_us']:.2f} µs, p99 {found['p99_us']:.1f}, "
        f"{found['cpu_s'] * 1e5 / found['steps']:.2f} s CPU per 10^5"
    )


def made_up(steps: int) -> list[Row]:
    """Return rows as a training makes them: loss, learning rate, accuracy, gradient norm.

    Loss and norm are noisy 32-bit floats as a tensor gives them, the rate a 64-bit cosine, the
    accuracy a share of 128 samples.
    """
    rng = random.Random(0)
    rows = []
    for step in range(steps):
        done = step / steps
        loss = 0.3 + 2 * math.exp(-8 * done) + rng.gauss(0, 0.05)
        rate = 5e-4 * (1 + math.cos(math.pi * done))
        right = min(128, max(0, round(120 + rng.gauss(0, 4))))
        rows.append((loss, rate, right / 128, 1 + abs(rng.gauss(0, 0.3))))
    losses, norms = (array("f", [row[i] for row in rows]).tolist() for i in (0, 3))
    return [
        (loss, row[1], row[2], norm) for loss, row, norm in zip(losses, rows, norms, strict=True)
    ]


def time_calls(log: Log, rows: Sequence[Row]) -> array[int]:
    """Log every row; return the nanoseconds of each call."""
    clock = time.perf_counter_ns
    spent = array("q", bytes(8 * len(rows)))
    for step, (loss, lr, acc, norm) in enumerate(rows):
        began = clock()
        log(step, loss, lr, acc, norm)
        spent[step] = clock() - began
    return spent


def log_fast(name: str, data: str, steps: int) -> dict[str, Any]:
    """Log all steps and finish, in a child process; return times, CPU and bytes."""
    folder = Path(data)
    rows = made_up(steps)
    adopt_orphans()
    log, finish = START[name](folder)
    empty_bytes, cpu_before, began = folder_bytes(folder), tree_cpu(), time.perf_counter()
    spent = time_calls(log, rows)
    logged, live_bytes = time.perf_counter(), folder_bytes(folder)
    finish()
    finished = time.perf_counter()
    await_children()
    ordered = sorted(spent)
    return {
        "steps": steps,
        "median_us": ordered[steps // 2] / 1e3,
        "p99_us": ordered[math.ceil(0.99 * steps) - 1] / 1e3,
        "max_us": ordered[-1] / 1e3,
        "cpu_s": tree_cpu() - cpu_before,
        "logging_s": logged - began,
        "finish_s": finished - logged,
        "empty_bytes": empty_bytes,
        "live_bytes": live_bytes,
        "bytes": folder_bytes(folder),
    }


def log_until_killed(name: str, data: str, note: str) -> None:
    """Log at RATE, in a child process; write the number of logged steps into the file `note`."""
    rows = made_up(100_000)
    log, _ = START[name](Path(data))
    with Path(note).open("r+b") as file:
        logged = memoryview(mmap.mmap(file.fileno(), 8)).cast("q")
    due, step = time.perf_counter(), 0
    while True:
        log(step, *rows[step % len(rows)])
        step += 1
        logged[0] = step
        due += 1 / RATE
        pause = due - time.perf_counter()
        if pause > 0:
            time.sleep(pause)


def count_stored(name: str, data: str) -> int:
    """Return how many complete steps can be read back, in a child process."""
    return STORED[name](Path(data))


def folder_bytes(folder: Path) -> int:
    """Return the size of all files below a folder; one that goes away meanwhile has none."""
    total = 0
    for path in folder.rglob("*"):
        with suppress(FileNotFoundError):
            if path.is_file():
                total += path.stat().st_size
    return total


def adopt_orphans() -> None:
    """Let processes whose parent ends become children of this one, so that their CPU is counted."""
    ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def tree_cpu() -> float:
    """Return the CPU seconds of this process and its children, those that ended included."""
    usages = (resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    total = sum(usage.ru_utime + usage.ru_stime for usage in usages)
    for child in psutil.Process().children(recursive=True):
        with suppress(psutil.NoSuchProcess):
            total += sum(child.cpu_times()[:4])  # user, system, and both of its own children
    return total


def await_children() -> None:
    """Wait until no child is left, at most STRAY_S, and collect their CPU times."""
    deadline = time.monotonic() + STRAY_S
    with suppress(ChildProcessError):
        while time.monotonic() < deadline:
            if os.waitpid(-1, os.WNOHANG)[0] == 0:
                time.sleep(0.02)


def main() -> None:
    """Measure and print one JSON object last."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="a smoke run of about a minute")
    parser.add_argument("--no-peers", action="store_true", help="Stepscope alone")
    parser.add_argument("--rounds", type=int, default=Plan().rounds)
    parser.add_argument("--wait-quiet", type=float, default=0, metavar="SECONDS")
    args = parser.parse_args()
    quick = Plan(rounds=1, kills=1, our_kills=2, share=0.2)
    plan = quick if args.quick else Plan(rounds=args.rounds)
    peers = without("left out (--no-peers)") if args.no_peers else prepare()
    adopt_orphans()
    report.wait_for_quiet(args.wait_quiet)
    load = os.getloadavg()[0]
    options = {"quick": args.quick, "peers": not args.no_peers, "rounds": plan.rounds}
    report.report("recorder", options, load, measure(peers, plan))


if __name__ == "__main__":
    main()
