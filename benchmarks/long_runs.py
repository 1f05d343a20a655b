"""Finished runs of any length with made-up values, for `reader.py`: ours and those of peers.

Each has four metrics a step, as noisy as a training's. Ours is written by StoreWriter in large
blocks, its last thousand rows in the small ones of a live run; trackio's by its own bulk call,
TensorBoard's as the event file that its SummaryWriter would write.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from importlib import import_module
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from benchmarks.peers.adapters import OURS, PROJECT
from stepscope.common.metrics import Stream
from stepscope.run import RunStatus, process_identity, write_run_json
from stepscope.store import STORE_NAME, SeriesBlock, StoreWriter

KEYS = ("train/loss", "perf/step_time", "perf/samples_per_sec", "perf/data_wait")
"""Four that the live page draws."""
CREATED = 1.7e9
STEP_S = 8e-4
CHUNK = 1 << 17
LAST, FLUSH = 1_000, 250
"""Rows at the end that are written as a live run's, and how many at a time."""


def values(start: int, stop: int) -> NDArray[np.float64]:
    """Return (4, n) values of the steps [start, stop): 32-bit noise, as tensors give it."""
    rng = np.random.default_rng(start)
    level = np.array([[0.4], [STEP_S], [4e4], [1e-5]])
    noisy = level * (1 + 0.1 * rng.standard_normal((4, stop - start)))
    return noisy.astype(np.float32).astype(np.float64)


def write_ours(folder: Path, steps: int) -> None:
    """Write a finished run; a trainer would have written the same rows, less at a time."""
    facts = {
        "schema": 1,
        "name": PROJECT,
        "created": CREATED,
        "ended": CREATED + steps * STEP_S,
        "status": RunStatus.FINISHED,
        "reason": None,
        "heartbeat": CREATED + steps * STEP_S,
        "problem": None,
        "config": {},
        "step": steps,
        **process_identity(),
    }
    write_run_json(folder, facts)
    writer = StoreWriter(folder / STORE_NAME)
    bulk = max(0, steps - LAST)
    for start in (*range(0, bulk, CHUNK), *range(bulk, steps, FLUSH)):
        stop = min(start + CHUNK, bulk) if start < bulk else min(start + FLUSH, steps)
        step = np.arange(start, stop, dtype=float)
        with writer.transaction():
            block = SeriesBlock.raw(KEYS, CREATED + step * STEP_S, step, values(start, stop))
            writer.append(Stream.STEPS, "", block)
    writer.close()


def write_trackio(folder: Path, steps: int) -> None:
    """Write steps to trackio's store; its folder is TRACKIO_DIR."""
    storage = import_module("trackio.sqlite_storage").SQLiteStorage
    size = min(10_000, steps)
    for start in range(0, steps, size):
        rows = values(start, start + size).T.tolist()
        metrics = [dict(zip(KEYS, row, strict=True)) for row in rows]
        storage.bulk_log(PROJECT, "run", metrics, list(range(start, start + size)))


def write_tensorboard(folder: Path, steps: int) -> None:
    """Write one event file: a scalar an event, as SummaryWriter writes it."""
    summary = import_module("tensorboard.compat.proto.summary_pb2").Summary
    writer = import_module("tensorboard.summary.writer.event_file_writer").EventFileWriter(
        str(folder), max_queue_size=1000
    )
    event = import_module("tensorboard.compat.proto.event_pb2").Event
    for start in range(0, steps, CHUNK):
        rows = values(start, min(start + CHUNK, steps)).T.tolist()
        for step, row in enumerate(rows, start):
            for key, value in zip(KEYS, row, strict=True):
                scalar = summary(value=[summary.Value(tag=key, simple_value=value)])
                now = CREATED + step * STEP_S
                writer.add_event(event(wall_time=now, step=step, summary=scalar))
    writer.close()


WRITE: dict[str, Callable[[Path, int], None]] = {
    OURS: write_ours,
    "trackio": write_trackio,
    "tensorboard": write_tensorboard,
}


def write_run(name: str, data: str, steps: int) -> float:
    """Write a run of one recorder; return how many seconds that took."""
    began = time.perf_counter()
    WRITE[name](Path(data), steps)
    return time.perf_counter() - began
