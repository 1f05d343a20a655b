"""One recorder in a process of its own, for `recorder.py`.

    python -m benchmarks.recording_child speed NAME FOLDER STEPS
    python -m benchmarks.recording_child paced NAME FOLDER NOTE
    python -m benchmarks.recording_child count NAME FOLDER

`speed` logs STEPS steps as fast as it can and prints what they took, as one JSON line at the end.
`paced` logs 1000 steps/s until it is killed and keeps the number logged in the mapped file NOTE.
`count` prints how many complete steps can be read back.
"""

from __future__ import annotations

import ctypes
import json
import math
import mmap
import os
import random
import resource
import sys
import time
from array import array
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil

from benchmarks.peers.adapters import START, STORED, Log

RATE = 1000.0
"""Steps a second before the kill."""
STRAY_S = 10.0
"""Longest wait for processes that a recorder left behind."""
_PR_SET_CHILD_SUBREAPER = 36

Row = tuple[float, float, float, float]


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


def speed(name: str, folder: Path, steps: int) -> dict[str, Any]:
    """Log all steps and finish; return times, CPU and bytes."""
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


def paced(name: str, folder: Path, note: Path) -> None:
    """Log at RATE for ever; the number of steps logged stands in the first 8 bytes of `note`."""
    rows = made_up(100_000)
    log, _ = START[name](folder)
    with note.open("r+b") as file:
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
    """Do what the arguments say."""
    mode, name, folder = sys.argv[1], sys.argv[2], Path(sys.argv[3])
    result: dict[str, Any] = {}
    if mode == "paced":
        paced(name, folder, Path(sys.argv[4]))
    elif mode == "speed":
        result = speed(name, folder, int(sys.argv[4]))
    else:
        result = {"steps": STORED[name](folder)}
    print("\n" + json.dumps(result), flush=True)


if __name__ == "__main__":
    main()
