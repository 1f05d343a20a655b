"""Energy that the active run has drawn from a GPU, from the run's own records."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import numpy as np

from dashboard.run_summary import samples_of_a_step
from stepscope.bottleneck.step_window import training_gpu
from stepscope.common.formatting import format_duration, format_energy
from stepscope.metrics import Stream
from stepscope.recorder.rows import RATE
from stepscope.run import RunInfo, read_only_reason
from stepscope.store import SeriesBlock, SeriesInfo, StoreError, StoreReader

MAX_BUCKETS = 512
MIN_DURATION_S = 2.0  # the driver updates the counter about every 0.1 s
CACHE_S = 5.0


@dataclass(frozen=True, slots=True)
class RunEnergy:
    """Joules that a GPU drew in `seconds` of a run, for all of its processes.

    `samples` is None if the run does not count samples or has several ranks.
    """

    run_id: str
    joules: float
    seconds: float
    samples: float | None

    @property
    def text(self) -> str:
        """The energy with its duration, per sample where samples are counted."""
        text = f"{format_energy(self.joules)} in {format_duration(self.seconds)}"
        return f"{text}, {self.joules / self.samples:.3g} J/sample" if self.samples else text


class RunEnergies:
    """Energy of the active run by GPU, read at most every CACHE_S. Thread-safe."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        self._known: dict[str, tuple[float, RunEnergy | None]] = {}

    def of(self, runs: Iterable[RunInfo], uuid: str) -> RunEnergy | None:
        """Return the energy of the newest live run of this host that trains on the GPU."""
        with self._lock:
            read_at, energy = self._known.get(uuid, (-CACHE_S, None))
            if self._clock() - read_at >= CACHE_S:
                run = next((run for run in runs if trains_on(run, uuid)), None)
                energy = None if run is None else run_energy(run, uuid)
                self._known[uuid] = self._clock(), energy
            return energy


def trains_on(run: RunInfo, uuid: str) -> bool:
    """Return True if a live run of this host and user trains on the GPU."""
    live = run.status.live and read_only_reason(run) is None
    return live and training_gpu(run.run_json) == uuid


def run_energy(run: RunInfo, uuid: str) -> RunEnergy | None:
    """Return the energy in the store of rank 0; None without a counter or before 2 s."""
    try:
        with StoreReader(run.folder) as reader:
            series = {(info.stream, info.source): info for info in reader.series()}
            info = series.get((Stream.DEVICES.value, uuid))
            if info is None or info.rows == 0:
                return None
            steps = series.get((Stream.STEPS.value, ""))
            several = run.run_json.get("world_size", 1) != 1
            samples = None if several or steps is None else _samples(reader, steps)
            started = float(reader.read(info.id, 0, 1, 1).ts[0])
            bucket = 1 << max(0, (info.rows - 1) // MAX_BUCKETS).bit_length()
            block = reader.read(info.id, 0, info.rows, bucket)
    except StoreError:
        return None
    seconds, joules = float(block.ts[-1]) - started, _joules(block)
    if seconds < MIN_DURATION_S or joules is None:
        return None
    return RunEnergy(run.id, joules, seconds, samples)


def _samples(reader: StoreReader, steps: SeriesInfo) -> float | None:
    """Return the samples of all steps: samples per step times the steps that had any."""
    whole = reader.read(steps.id, 0, steps.rows, 1 << steps.rows.bit_length())
    each = samples_of_a_step(reader)
    if each is None or RATE not in whole.keys:
        return None
    return each * float(whole.count[whole.keys.index(RATE)].sum())


def _joules(block: SeriesBlock) -> float | None:
    """Return the increase of the energy counter over the buckets; None below two readings.

    Between resets the counter only rises, so a bucket's minimum and maximum are its first and last
    value. A reset (a reloaded driver) adds nothing.
    """
    if "gpu/energy" not in block.keys:
        return None
    row = block.keys.index("gpu/energy")
    low, high = (values[row][block.count[row] > 0] for values in (block.low, block.high))
    if not len(low) or high.max() == low.min():
        return None
    return float((high - low).sum() + np.maximum(0.0, low[1:] - high[:-1]).sum())
