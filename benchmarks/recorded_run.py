"""A live run of any length with made-up values: `python -m benchmarks.recorded_run FOLDER STEPS`.

Writes a run of STEPS steps that looks as if it had been training on one GPU at 25 steps/s with the
10 Hz sampler on, prints `ready`, and goes on at that rate until its stdin ends (at most an hour).
"""

from __future__ import annotations

import sys
import threading
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from stepscope.common.metrics import METRICS, Stream
from stepscope.run import RunStatus, process_identity, write_run_json
from stepscope.store import STORE_NAME, SeriesBlock, StoreWriter
from stepscope.store.blocks import Event
from trainer.config import Workload, defaults

STEP_RATE = 25.0
SAMPLE_RATE = 10.0
STEPS_PER_EPOCH = 102
GPU = "GPU-00000000-0000-0000-0000-000000000000"
FLUSH_S = 0.25
CHUNK_ROWS = 20_000
LIFE_S = 3600.0

# Metric -> (level, noise); the values are made up, their number of digits is like a GPU's.
_LEVELS: dict[str, tuple[float, float]] = {
    "train/loss": (0.4, 0.05),
    "train/lr": (5e-4, 0.0),
    "train/epoch": (1, 0),
    "val/loss": (0.5, 0.02),
    "val/accuracy": (97.0, 0.5),
    "perf/step_time": (0.04, 0.002),
    "perf/samples_per_sec": (3200.0, 160.0),
    "perf/data_wait": (3e-4, 5e-5),
    "memory/allocated": (31e9, 1e6),
    "memory/reserved": (44e9, 0),
    "memory/active": (31e9, 1e6),
    "memory/peak_allocated": (42e9, 0),
    "memory/peak_reserved": (44e9, 0),
    "memory/inactive_split": (2e9, 1e6),
    "memory/alloc_retries": (0, 0),
    "memory/ooms": (0, 0),
    "process/rss": (3e9, 1e6),
    "process/peak_rss": (3.1e9, 0),
    "process/cpu": (97.0, 3.0),
    "host/cpu": (24.0, 4.0),
    "host/mem_used": (21e9, 1e7),
    "host/mem_total": (64e9, 0),
    "sampler/cost": (3e-4, 5e-5),
    "gpu/util": (93.0, 4.0),
    "gpu/mem_util": (61.0, 5.0),
    "gpu/mem_used": (46e9, 1e6),
    "gpu/mem_total": (80e9, 0),
    "gpu/temp": (61.0, 1.0),
    "gpu/power": (540.0, 25.0),
    "gpu/power_limit": (700.0, 0),
    "gpu/energy": (5e6, 10.0),
    "gpu/sm_clock": (1755.0, 10.0),
    "gpu/mem_clock": (2619.0, 0),
    "gpu/throttle_reasons": (0, 0),
}
# Read or logged only every so many rows; missing between.
_EVERY = {
    "val/loss": STEPS_PER_EPOCH,
    "val/accuracy": STEPS_PER_EPOCH,
    "host/cpu": 10,
    "host/mem_used": 10,
    "host/mem_total": 10,
    "gpu/temp": 10,
    "gpu/mem_total": 10,
    "gpu/power_limit": 10,
    "gpu/mem_clock": 10,
}


class RecordedRun:
    """The writer of one made-up run; used by one thread."""

    def __init__(self, folder: Path, steps: int) -> None:
        self._folder = folder
        self._rng = np.random.default_rng(0)
        self._created = time.time() - steps / STEP_RATE
        self._rows = dict.fromkeys((Stream.STEPS, Stream.SAMPLES, Stream.DEVICES), 0)
        self._facts = _facts(self._created)
        write_run_json(folder, self._facts)  # the folder is a run before it has a store
        self._writer = StoreWriter(folder / STORE_NAME)

    def write_until(self, now: float) -> None:
        """Append every row and epoch event up to a time, and a sign of life."""
        age = now - self._created
        for stream, rows in self._rows.items():
            rate = STEP_RATE if stream is Stream.STEPS else SAMPLE_RATE
            end = int(age * rate)
            for start in range(rows, end, CHUNK_ROWS):
                self._append(stream, rate, start, min(end, start + CHUNK_ROWS))
            self._rows[stream] = end
        step = self._rows[Stream.STEPS]
        self._facts.update(heartbeat=time.time(), step=step, epoch=1 + step // STEPS_PER_EPOCH)
        write_run_json(self._folder, self._facts)

    def close(self) -> None:
        """Fold the store and mark the run as stopped."""
        self._writer.close()
        write_run_json(self._folder, {**self._facts, "status": RunStatus.STOPPED})

    def _append(self, stream: Stream, rate: float, start: int, stop: int) -> None:
        row = np.arange(start, stop, dtype=float)
        ts = self._created + (row + 1) / rate
        step = np.floor((ts - self._created) * STEP_RATE)
        keys = [
            metric.key for metric in METRICS if metric.stream is stream and metric.key in _LEVELS
        ]
        values = np.array([self._values(key, row) for key in keys])
        with self._writer.transaction():
            source = GPU if stream is Stream.DEVICES else ""
            self._writer.append(stream, source, SeriesBlock.raw(keys, ts, step, values))
            if stream is Stream.STEPS:
                self._epoch_events(start, stop)

    def _values(self, key: str, row: NDArray[np.float64]) -> NDArray[np.float64]:
        level, noise = _LEVELS[key]
        values = level + noise * self._rng.standard_normal(len(row))
        if key == "train/epoch":
            values = 1 + row // STEPS_PER_EPOCH
        if key.endswith("/loss"):
            values = values + 2 * np.exp(-row / 500)
        every = _EVERY.get(key, 1)
        return np.where(row % every == every - 1, values, np.nan)

    def _epoch_events(self, start: int, stop: int) -> None:
        for epoch in range(-(-start // STEPS_PER_EPOCH), -(-stop // STEPS_PER_EPOCH)):
            step = epoch * STEPS_PER_EPOCH
            text = f"Epoch {epoch}: validation loss 0.5012, accuracy 97.0 %, 4.08 s"
            data = {"val/loss": 0.5012, "val/accuracy": 97.0, "seconds": 4.08}
            ts = self._created + step / STEP_RATE
            self._writer.add_event(Event(ts, step, epoch, "epoch", text, data))


def _facts(created: float) -> dict[str, Any]:
    config = replace(defaults(Workload.DIGITS_CNN, GPU), epochs=100_000)
    gpu = {"uuid": GPU, "name": "made-up GPU", "memory_total": 80e9}
    return {
        "schema": 1,
        "name": "benchmark",
        "created": created,
        "status": RunStatus.RUNNING,
        "reason": None,
        "heartbeat": created,
        "problem": None,
        "config": config.to_dict(),
        "total_steps": 100_000 * STEPS_PER_EPOCH,
        "first_step": 0,
        "epochs": 100_000,
        "devices": [gpu],
        **process_identity(),
    }


def main() -> None:
    """Write the history, then live on."""
    folder, steps = Path(sys.argv[1]), int(sys.argv[2])
    folder.mkdir(parents=True)
    run, ended = RecordedRun(folder, steps), threading.Event()
    run.write_until(time.time())
    print("ready", flush=True)
    threading.Thread(target=lambda: (sys.stdin.read(), ended.set()), daemon=True).start()
    deadline = time.monotonic() + LIFE_S
    while not ended.wait(FLUSH_S) and time.monotonic() < deadline:
        run.write_until(time.time())
    run.close()


if __name__ == "__main__":
    main()
