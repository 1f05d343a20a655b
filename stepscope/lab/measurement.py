"""The metrics of a trial, from its run folder.

Steps are not independent: workers deliver batches in bursts, and an epoch starts slowly. So the
rate is the median over blocks of many steps; docs/lab.md explains what it does not include.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from stepscope.gpu.health import throttle_words
from stepscope.recorded_run import Run, open_run
from stepscope.run.rank_info import find_rank

BLOCKS = 10
MIN_EPOCHS = 5  # Whole epochs of a window whose blocks are its epochs.
MIN_BLOCK_STEPS = 10  # More than the steps of a burst, which has one per worker.
MIN_BLOCKS = 3
TIMES = ("data_wait", "h2d", "gpu_time", "mfu")
PEAKS = {
    "peak_allocated": "memory/peak_allocated",
    "peak_reserved": "memory/peak_reserved",
    "peak_process": "process/peak_rss",
}
STEPS_S = "steps/s"
LOSS_FRACTION = 0.2  # The loss is the mean over this last fraction of the measured steps.

Floats = NDArray[np.float64]


class RunTooShortError(Exception):
    """A run with too few steps to measure; the message is a sentence."""


def rate(seconds: Floats, samples: Floats, epochs: Floats) -> float:
    """Return the samples/s of a window of steps: the median over its blocks.

    A block is an epoch if the window has MIN_EPOCHS whole ones. Otherwise the window is cut into
    ten blocks, each right after a slow step, so that a block has whole bursts. The rate of a window
    with fewer than MIN_BLOCKS blocks of MIN_BLOCK_STEPS steps is the mean over all its steps.
    """
    cuts = epoch_cuts(epochs)
    if len(cuts) <= MIN_EPOCHS:
        cuts = burst_cuts(seconds)
    if len(cuts) <= MIN_BLOCKS:
        return float(samples.sum() / seconds.sum())
    # A cut is the first step of a block; the last cut is the end of the last block.
    took = np.add.reduceat(seconds, cuts[:-1])
    done = np.add.reduceat(samples, cuts[:-1])
    took[-1] -= seconds[cuts[-1] :].sum()
    done[-1] -= samples[cuts[-1] :].sum()
    return float(np.median(done / took))


def epoch_cuts(epochs: Floats) -> NDArray[np.intp]:
    """Return the first step of each whole epoch, and the end of the last; none without epochs."""
    change = np.diff(epochs)
    return np.flatnonzero(np.isfinite(change) & (change != 0)) + 1


def burst_cuts(seconds: Floats) -> NDArray[np.intp]:
    """Return the first step of each block, and the end of the last one.

    Each cut follows the slowest step near an even cut, so no burst of fast steps is divided from
    the slow step that waited for it.
    """
    count = min(BLOCKS, len(seconds) // MIN_BLOCK_STEPS)
    if count < MIN_BLOCKS:
        return np.array([], dtype=np.intp)
    length = len(seconds) // (count + 1)
    starts = np.arange(count + 1) * length
    return np.array(
        [start + int(np.argmax(seconds[start : start + length])) + 1 for start in starts],
        dtype=np.intp,
    )


def measured(folder: Path, warmup: int, ranks: int = 1) -> dict[str, Any]:
    """Return the metrics of the run in `folder` without its first `warmup` steps.

    Of several ranks: the total rate, the largest memory, mean times, and the energy of all GPUs.
    The loss and the throttle reasons are those of rank 0. Missing values are None. Raises
    RunTooShortError, RunError and StoreError.
    """
    runs = [open_run(folder, rank=rank) for rank in range(ranks)]
    each = [Steps(run, warmup) for run in runs]
    files = (find_rank(folder, rank) for rank in range(ranks))
    devices = [None if file is None else file.run_json.get("device") for file in files]
    seconds, samples = steps_together(each)
    unit = STEPS_S if any(steps.unit == STEPS_S for steps in each) else each[0].unit
    if unit == STEPS_S:
        samples = np.ones(len(seconds))  # a step of all ranks is one step
    total = float(samples.sum())
    per_second = rate(seconds, samples, each[0].epochs[: len(seconds)])
    losses = each[0].of("train/loss")
    losses = losses[-math.ceil(len(losses) * LOSS_FRACTION) :]
    finite = bool(np.isfinite(losses).all())
    return {
        "samples_per_sec": per_second,
        "rate_unit": unit,
        "step_time": total / len(seconds) / per_second,
        "steps": len(seconds),
        **{
            name: _reduced(np.mean, [_reduced(np.mean, steps.of(f"perf/{name}")) for steps in each])
            for name in TIMES
        },
        **{
            name: _reduced(np.max, [_reduced(np.max, _values(run, key)) for run in runs])
            for name, key in PEAKS.items()
        },
        "loss": float(losses.mean()) if finite else None,
        "loss_finite": finite,
        **_device(runs[0], each[0], devices, float(seconds.sum()) / total),
    }


def steps_together(ranks: list[Steps]) -> tuple[Floats, Floats]:
    """Return seconds and samples of each step of all ranks.

    A step ends when all ranks have ended it. The window begins with the last rank's end of the
    warm-up: the average of the gradients is a barrier in each step. Time between two steps, such as
    validation, is excluded if all ranks spend it: others wait for rank 0's within a step.
    """
    count = min(len(steps.seconds) for steps in ranks)
    longest: Floats = np.max([steps.seconds[:count] for steps in ranks], axis=0)
    samples: Floats = np.sum([steps.samples[:count] for steps in ranks], axis=0)
    if len(ranks) == 1:
        return longest, samples
    ended = np.max([steps.times[:count] for steps in ranks], axis=0)
    return np.append(longest[:1], np.minimum(np.diff(ended), longest[1:])), samples


def _values(run: Run, key: str) -> Floats:
    return run.series(key).value if key in run.metrics else np.array([])


def _reduced(
    function: Callable[[Floats], Any], values: Sequence[float | None] | Floats
) -> float | None:
    """Return a function of the finite values; None without any. A value of None is missing."""
    found = np.array(values, dtype=float)
    found = found[np.isfinite(found)]
    return float(function(found)) if len(found) else None


class Steps:
    """The steps after warm-up; `times` are their ends in epoch seconds."""

    def __init__(self, run: Run, warmup: int) -> None:
        self._run = run
        if "perf/step_time" not in run.metrics:
            raise RunTooShortError("The run recorded no step.")
        series = run.series("perf/step_time")
        timed = np.flatnonzero(np.isfinite(series.value) & (series.value > 0))
        self._rows = timed[warmup:]
        if len(self._rows) < 2:
            raise RunTooShortError(
                f"The run made {len(timed)} steps, {warmup} of them warm-up: none is left to "
                "measure. Increase the epochs or reduce the warm-up steps."
            )
        self.times = series.time[self._rows]
        self.seconds = series.value[self._rows]
        self.samples = self.of("perf/samples_per_sec") * self.seconds
        self.unit = "samples/s"
        if not np.isfinite(self.samples).all():  # of a script without a DataLoader
            self.samples, self.unit = np.ones(len(self._rows)), STEPS_S
        self.epochs = self.of("train/epoch")
        self.began = float(series.time[self._rows[0]] - self.seconds[0])
        self.ended = float(series.time[self._rows[-1]])

    def of(self, key: str) -> Floats:
        """Return a metric of these steps, NaN if missing."""
        values = _values(self._run, key)
        return values[self._rows] if len(values) else np.full(len(self._rows), np.nan)


def _device(
    run: Run, steps: Steps, devices: Sequence[str | None], seconds_per_sample: float
) -> dict[str, Any]:
    """Return NVML's values during the measured steps of the ranks' `devices`; all None on a CPU."""
    first = next(iter(run.gpus), "")
    gpus = list(dict.fromkeys(device or first for device in devices))
    masks = _during(run, "gpu/throttle_reasons", gpus[0], steps)[1]
    words = {word for mask in masks for word in throttle_words(int(mask))}
    watts = [power for gpu in gpus if (power := _power(run, gpu, steps)) is not None]
    return {
        "throttle": ", ".join(sorted(words)) or None,
        "energy_per_sample": sum(watts) * seconds_per_sample if len(watts) == len(gpus) else None,
    }


def _power(run: Run, gpu: str, steps: Steps) -> float | None:
    """Return a GPU's mean power in watts between two readings of its energy counter."""
    times, energy = _during(run, "gpu/energy", gpu, steps)
    if len(energy) < 2:
        return None
    return float((energy[-1] - energy[0]) / (times[-1] - times[0]))


def _during(run: Run, key: str, gpu: str, steps: Steps) -> tuple[Floats, Floats]:
    """Return times and values of a GPU's metric during the measured steps; empty if missing."""
    if key not in run.metrics or gpu not in run.gpus:
        return np.array([]), np.array([])
    series = run.series(key, gpu)
    within = (series.time >= steps.began) & (series.time <= steps.ended)
    within &= np.isfinite(series.value)
    return series.time[within], series.value[within]
