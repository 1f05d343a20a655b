"""The energy that the active run has taken from a GPU, from what the run has recorded."""

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
from stepscope.store.blocks import Floats

MAX_BUCKETS = 512
SHORTEST_S = 2.0
"""The driver renews the counter about every 0.1 s: over less than this it tells little."""
KEPT_S = 5.0


@dataclass(frozen=True, slots=True)
class RunEnergy:
    """Joules that a GPU took in `seconds` of a run, for all that ran on it.

    `from_counter` is False for an estimate from the recorded power. `samples` is None where the run
    does not count them, or where several ranks share the work.
    """

    run_id: str
    joules: float
    seconds: float
    from_counter: bool
    samples: float | None

    @property
    def text(self) -> str:
        """What the page says."""
        text = f"{format_energy(self.joules)} in {format_duration(self.seconds)}"
        if self.samples:
            text += f", {self.joules / self.samples:.3g} J a sample"
        return text if self.from_counter else f"{text}, estimated from the power"


class RunEnergies:
    """The energy of the active run by GPU, read at most every KEPT_S for all tabs together."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        self._known: dict[str, tuple[float, RunEnergy | None]] = {}

    def of(self, runs: Iterable[RunInfo], uuid: str) -> RunEnergy | None:
        """Return that of the newest live run of this host that trains on the GPU."""
        with self._lock:
            at, energy = self._known.get(uuid, (-KEPT_S, None))
            if self._clock() - at < KEPT_S:
                return energy
            run = next((run for run in runs if trains_on(run, uuid)), None)
            energy = None if run is None else run_energy(run, uuid)
            self._known[uuid] = self._clock(), energy
            return energy


def trains_on(run: RunInfo, uuid: str) -> bool:
    """Say whether this is a live run of this host and user that trains on the GPU."""
    live = run.status.live and read_only_reason(run) is None
    return live and training_gpu(run.run_json) == uuid


def run_energy(run: RunInfo, uuid: str) -> RunEnergy | None:
    """Read it from the store of rank 0, which samples the GPUs; None where there is too little."""
    try:
        with StoreReader(run.folder) as reader:
            series = {(info.stream, info.source): info for info in reader.series()}
            info = series.get((Stream.DEVICES.value, uuid))
            if info is None or info.rows == 0:
                return None
            steps = series.get((Stream.STEPS.value, ""))
            several = run.run_json.get("world_size", 1) != 1
            samples = None if several or steps is None else _samples(reader, steps)
            begun = float(reader.read(info.id, 0, 1, 1).ts[0])
            bucket = 1 << max(0, (info.rows - 1) // MAX_BUCKETS).bit_length()
            found = energy_of(reader.read(info.id, 0, info.rows, bucket), begun)
    except StoreError:
        return None
    if found is None:
        return None
    joules, seconds, counted = found
    return RunEnergy(run.id, joules, seconds, counted, samples)


def _samples(reader: StoreReader, steps: SeriesInfo) -> float | None:
    """Return the samples of all steps: those of a step times the steps that had any."""
    whole = reader.read(steps.id, 0, steps.rows, 1 << steps.rows.bit_length())
    each = samples_of_a_step(reader)
    if each is None or RATE not in whole.keys:
        return None
    return each * float(whole.count[whole.keys.index(RATE)].sum())


def energy_of(block: SeriesBlock, begun: float) -> tuple[float, float, bool] | None:
    """Return joules, seconds and whether the driver counted them, of buckets of one GPU's rows.

    `begun` is the time of the first row; a bucket has that of its last one. The counter only rises,
    so a bucket's lowest and highest value are its first and last. Where it falls the driver was
    loaded anew, and what the GPU took in between is not known.
    """
    seconds = float(block.ts[-1]) - begun if len(block) else 0.0
    if seconds < SHORTEST_S:
        return None
    low, high, _ = _known(block, "gpu/energy")
    if len(low) and high.max() > low.min():  # one reading of the counter is no difference
        between = np.maximum(0.0, low[1:] - high[:-1])
        return float((high - low).sum() + between.sum()), seconds, True
    _, _, power = _known(block, "gpu/power")
    if not len(power):
        return None
    lengths = np.diff(block.ts, prepend=begun)[block.count[block.keys.index("gpu/power")] > 0]
    return float((power * lengths).sum()), float(lengths.sum()), False


def _known(block: SeriesBlock, key: str) -> tuple[Floats, Floats, Floats]:
    """Return the lowest, highest and mean values of a metric, of the buckets that have some."""
    if key not in block.keys:
        nothing = np.empty(0)
        return nothing, nothing, nothing
    place = block.keys.index(key)
    known = block.count[place] > 0
    return block.low[place][known], block.high[place][known], block.mean[place][known]
