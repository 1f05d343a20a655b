"""A live job with made-up values: `python -m benchmarks.recorded_job FOLDER RANKS STEPS`.

Writes a job that looks as if its ranks, eight a host, had trained STEPS steps at 25 steps/s with a
GPU each, prints `ready`, and goes on at that rate until its stdin ends (at most an hour). One rank
is slower than the others in the last third of the run: they wait for it.
"""

from __future__ import annotations

import argparse
import sys
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from stepscope.run import RunStatus, process_identity, rank_json, write_run_json
from stepscope.store import SeriesBlock, StoreWriter, store_name

STEP_RATE = 25.0
SAMPLE_RATE = 10.0
A_HOST = 8
FLUSH_S = 0.5
CHUNK_ROWS = 20_000
LIFE_S = 3600.0
MEMORY = 80e9
Values = dict[str, NDArray[np.float64]]


class RecordedRank:
    """The writer of one made-up rank; used by one thread."""

    def __init__(self, folder: Path, rank: int, ranks: int, created: float) -> None:
        self._folder, self._rank, self._ranks, self._created = folder, rank, ranks, created
        self._rng = np.random.default_rng(rank)
        self._facts = _facts(rank, ranks, created)
        write_run_json(folder, self._facts, rank_json(rank), durable=False)
        self._writer = StoreWriter(folder / store_name(rank))
        self._rows = {"steps": 0, "samples": 0, "devices": 0}
        self._slow_from = np.inf

    def write_until(self, now: float) -> None:
        """Append every row up to a time, and a sign of life."""
        age = now - self._created
        self._slow_from = min(self._slow_from, age * 2 / 3)
        with self._writer.transaction():
            for stream in self._rows:
                self._append(stream, age)
        self._facts.update(heartbeat=time.time(), step=self._rows["steps"])
        write_run_json(self._folder, self._facts, rank_json(self._rank), durable=False)

    def close(self) -> None:
        """Fold the store and mark the rank as finished."""
        self._writer.close()
        ended = {"status": RunStatus.FINISHED, "ended": time.time()}
        write_run_json(self._folder, {**self._facts, **ended}, rank_json(self._rank), durable=False)

    def _append(self, stream: str, age: float) -> None:
        rate = STEP_RATE if stream == "steps" else SAMPLE_RATE
        start, end = self._rows[stream], int(age * rate)
        self._rows[stream] = end
        if stream == "devices" and self._rank % A_HOST:
            return  # the first rank of a host samples all its GPUs
        for first in range(start, end, CHUNK_ROWS):
            row = np.arange(first, min(end, first + CHUNK_ROWS), dtype=float)
            seconds = (row + 1) / rate
            step = np.floor(seconds * STEP_RATE)
            for source, values in self._values(stream, seconds):
                table = np.array(list(values.values()))
                block = SeriesBlock.raw(tuple(values), self._created + seconds, step, table)
                self._writer.append(stream, source, block)

    def _values(self, stream: str, seconds: NDArray[np.float64]) -> list[tuple[str, Values]]:
        noise = self._rng.standard_normal
        count, slow = len(seconds), seconds > self._slow_from
        if stream == "samples":
            used = (28 + 0.2 * self._rank) * 1e9 + 1e7 * noise(count)
            return [("", {"memory/allocated": used, "memory/peak_allocated": used + 4e9})]
        if stream == "devices":
            gpus = [f"GPU-{self._rank + place:03d}" for place in range(A_HOST)]
            return [(gpu, {"gpu/util": np.clip(92 + 4 * noise(count), 0, 100)}) for gpu in gpus]
        late = self._rank == straggler(self._ranks)
        wait = np.where(slow, 0.001 if late else 0.007, 0.0015) + 2e-4 * np.abs(noise(count))
        step_time = np.where(slow, 0.046, 0.04) + 5e-4 * noise(count)
        loss = 0.4 + 2 * np.exp(-seconds * STEP_RATE / 500) + 0.03 * noise(count)
        values = {"perf/step_time": step_time, "perf/data_wait": 3e-4 + 5e-5 * noise(count)}
        sampled = np.where(np.arange(count) % 10 == 9, wait, np.nan)
        return [("", values | {"perf/comm_wait": sampled, "train/loss": loss})]


def straggler(ranks: int) -> int:
    """Return the rank that is made slow."""
    return ranks * 2 // 3


def _facts(rank: int, ranks: int, created: float) -> dict[str, Any]:
    first = rank - rank % A_HOST
    gpus = [
        {"uuid": f"GPU-{first + place:03d}", "name": "made-up GPU", "memory_total": MEMORY}
        for place in range(A_HOST)
    ]
    return {
        "schema": 1,
        "name": f"job of {ranks}",
        "kind": "watch",
        "created": created,
        "status": RunStatus.RUNNING,
        "reason": None,
        "heartbeat": created,
        "problem": None,
        "config": {},
        "rank": rank,
        "local_rank": rank % A_HOST,
        "world_size": ranks,
        "device": f"GPU-{rank:03d}",
        "devices": gpus if rank % A_HOST == 0 else [],
        **process_identity(),
        "host": f"node{rank // A_HOST:02d}",
    }


class RecordedJob:
    """The writers of all ranks of a made-up job; used by one thread."""

    def __init__(self, folder: Path, ranks: int, steps: int) -> None:
        created = time.time() - steps / STEP_RATE
        folder.mkdir(parents=True, exist_ok=True)
        self._ranks = [RecordedRank(folder, rank, ranks, created) for rank in range(ranks)]

    def write_until(self, now: float) -> None:
        """Append what each rank did up to a time."""
        for rank in self._ranks:
            rank.write_until(now)

    def close(self) -> None:
        """End all ranks."""
        for rank in self._ranks:
            rank.close()


def main() -> None:
    """Write the history, then live on."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("ranks", type=int)
    parser.add_argument("steps", type=int)
    given = parser.parse_args()
    job, ended = RecordedJob(given.folder, given.ranks, given.steps), threading.Event()
    job.write_until(time.time())
    print("ready", flush=True)
    threading.Thread(target=lambda: (sys.stdin.read(), ended.set()), daemon=True).start()
    deadline = time.monotonic() + LIFE_S
    while not ended.wait(FLUSH_S) and time.monotonic() < deadline:
        job.write_until(time.time())
    job.close()


if __name__ == "__main__":
    main()
