"""What one run tells a sweep: its rate after warm-up, and the other values of a sample.

Steps are no independent samples: they come in bursts where workers load, and an epoch has a slow
start. So the rate is the median over blocks of many steps; docs/lab.md says what that leaves out.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from stepscope.gpu.device_events import throttle_words
from stepscope.recorded_run import Run, open_run

BLOCKS = 10
FEWEST_EPOCHS = 5  # Whole epochs in the window from which on each epoch is a block.
BLOCK_STEPS = 10
"""Steps that a block has at least: more than the steps of a burst, which are the workers."""
FEWEST_BLOCKS = 3
TIMES = ("data_wait", "h2d", "gpu_time", "mfu")
PEAKS = {
    "peak_allocated": "memory/peak_allocated",
    "peak_reserved": "memory/peak_reserved",
    "peak_process": "process/peak_rss",
}
LOSS_SHARE = 0.2  # Share of the measured steps, the last ones, whose mean loss is the sample's.

Floats = NDArray[np.float64]


class RunTooShortError(Exception):
    """A run of which nothing can be measured; the message is a sentence."""


def rate(seconds: Floats, samples: Floats, epochs: Floats) -> float:
    """Return samples/s of a window of steps: the median over its blocks.

    A block is an epoch where the window has FEWEST_EPOCHS whole ones. Else ten blocks of steps are
    cut, each right after a slow step, so that each holds whole bursts. A window too short for
    FEWEST_BLOCKS blocks of BLOCK_STEPS steps gives the mean over all its steps.
    """
    cuts = epoch_cuts(epochs)
    if len(cuts) <= FEWEST_EPOCHS:
        cuts = burst_cuts(seconds)
    if len(cuts) <= FEWEST_BLOCKS:
        return float(samples.sum() / seconds.sum())
    # A cut is the first step of a block; the last one ends the last block.
    took = np.add.reduceat(seconds, cuts[:-1])
    done = np.add.reduceat(samples, cuts[:-1])
    took[-1] -= seconds[cuts[-1] :].sum()
    done[-1] -= samples[cuts[-1] :].sum()
    return float(np.median(done / took))


def epoch_cuts(epochs: Floats) -> NDArray[np.intp]:
    """Return where each whole epoch of the window begins, and where the last one ends.

    The first epoch counts as cut by the warm-up, and the last as cut by the end of the run.
    """
    return np.flatnonzero(np.diff(epochs)) + 1


def burst_cuts(seconds: Floats) -> NDArray[np.intp]:
    """Return where blocks of steps begin, and where the last one ends.

    Near each of the even cuts it takes the end of the slowest step. In a burst of fast steps that
    is the step that waited for it: so each block has as many slow steps as belong to its fast ones.
    """
    count = min(BLOCKS, len(seconds) // BLOCK_STEPS)
    if count < FEWEST_BLOCKS:
        return np.array([], dtype=np.intp)
    length = len(seconds) // (count + 1)
    starts = np.arange(count + 1) * length
    return np.array(
        [start + int(np.argmax(seconds[start : start + length])) + 1 for start in starts],
        dtype=np.intp,
    )


def measured(folder: Path, warmup: int, ranks: int = 1) -> dict[str, Any]:
    """Return the metrics of the run in `folder`, its first `warmup` steps left out.

    Of several ranks: the rate of all together, the memory of the rank that needs most, and mean
    times. The loss and the GPU's clock and power are those of rank 0; energy is missing. Missing
    values are None. Raises RunTooShortError, RunError and StoreError.
    """
    runs = [open_run(folder, rank=rank) for rank in range(ranks)]
    each = [Steps(run, warmup) for run in runs]
    seconds, samples = steps_together(each)
    total, window = float(samples.sum()), float(seconds.sum())
    per_second = rate(seconds, samples, each[0].epochs[: len(seconds)])
    loss, finite = _loss(runs[0], each[0])
    return {
        "samples_per_sec": per_second,
        "mean_samples_per_sec": total / window,
        "step_time": total / len(seconds) / per_second,
        "steps": len(seconds),
        "window_s": window,
        **{name: _over(np.mean, [steps.mean(f"perf/{name}") for steps in each]) for name in TIMES},
        **{
            name: _over(np.max, [_highest(run, key) for run in runs]) for name, key in PEAKS.items()
        },
        "loss": loss,
        "loss_finite": finite,
        **_device(runs[0], each[0], total if ranks == 1 else None),
    }


def steps_together(ranks: list[Steps]) -> tuple[Floats, Floats]:
    """Return seconds and samples of each step of all ranks.

    A step counts once all ranks have made it. The window begins with the last rank's end of the
    warm-up: averaging the gradients is a barrier in each step. The time between two steps that is
    no step, such as validation, is left out.
    """
    count = min(len(steps.seconds) for steps in ranks)
    own: Floats = np.max([steps.seconds[:count] for steps in ranks], axis=0)
    samples: Floats = np.sum([steps.samples[:count] for steps in ranks], axis=0)
    if len(ranks) == 1:
        return own, samples
    ended = np.max([steps.times[:count] for steps in ranks], axis=0)
    return np.append(own[:1], np.minimum(np.diff(ended), own[1:])), samples


def _over(of: Callable[[Any], Any], values: list[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return float(of(known)) if known else None


class Steps:
    """The rows of the steps after warm-up."""

    def __init__(self, run: Run, warmup: int) -> None:
        self._run = run
        self._known = frozenset(run.metrics)
        if "perf/step_time" not in self._known:
            raise RunTooShortError("The run recorded no step.")
        series = run.series("perf/step_time")
        timed = np.flatnonzero(np.isfinite(series.value) & (series.value > 0))
        self._rows = timed[timed >= (timed[warmup] if warmup < len(timed) else len(series.value))]
        if len(self._rows) < 2:
            raise RunTooShortError(
                f"The run made {len(timed)} steps, {warmup} of them warm-up: nothing is left to "
                "measure. Give more epochs or fewer warm-up steps."
            )
        self.times = series.time[self._rows]
        """When each step ended, in epoch seconds."""
        self.seconds = series.value[self._rows]
        self.samples = self.of("perf/samples_per_sec") * self.seconds
        self.epochs = self.of("train/epoch")
        self.began = float(series.time[self._rows[0]] - self.seconds[0])
        self.ended = float(series.time[self._rows[-1]])

    def of(self, key: str) -> Floats:
        """Return a metric of these steps."""
        return self._run.series(key).value[self._rows]

    def mean(self, key: str) -> float | None:
        """Return the mean of a metric over the steps that have it; None where none has."""
        if key not in self._known:
            return None
        values = self.of(key)
        values = values[np.isfinite(values)]
        return float(values.mean()) if len(values) else None


def _loss(run: Run, steps: Steps) -> tuple[float | None, bool]:
    """Return the mean loss of the last steps, and whether all of them were finite numbers."""
    losses = steps.of("train/loss") if "train/loss" in run.metrics else np.array([])
    losses = losses[-max(1, math.ceil(len(losses) * LOSS_SHARE)) :]
    finite = bool(len(losses)) and bool(np.isfinite(losses).all())
    return (float(losses.mean()) if finite else None), finite


def _highest(run: Run, key: str) -> float | None:
    if key not in run.metrics:
        return None
    values = run.series(key).value
    values = values[np.isfinite(values)]
    return float(values.max()) if len(values) else None


def _device(run: Run, steps: Steps, samples: float | None) -> dict[str, Any]:
    """Return what NVML said during the measured steps; all None on a CPU.

    The energy is that of each of `samples`.
    """
    clock, power = (_during(run, key, steps) for key in ("gpu/sm_clock", "gpu/power"))
    masks = _during(run, "gpu/throttle_reasons", steps)
    words = {word for mask in masks[1] for word in throttle_words(int(mask))}
    energy = _during(run, "gpu/energy", steps)
    joules = None
    if samples and len(energy[1]) > 1:
        # Over the time between two readings, then for the seconds that the samples took.
        watts = (energy[1][-1] - energy[1][0]) / (energy[0][-1] - energy[0][0])
        joules = float(watts * steps.seconds.sum() / samples)
    return {
        "sm_clock": float(clock[1].mean()) if len(clock[1]) else None,
        "power": float(power[1].mean()) if len(power[1]) else None,
        "throttle": ", ".join(sorted(words)) or None,
        "energy_per_sample": joules,
    }


def _during(run: Run, key: str, steps: Steps) -> tuple[Floats, Floats]:
    """Return times and values of the first GPU's metric while the measured steps ran."""
    if key not in run.metrics or not run.gpus:
        return np.array([]), np.array([])
    series = run.series(key, run.gpus[0])
    within = (series.time >= steps.began) & (series.time <= steps.ended)
    within &= np.isfinite(series.value)
    return series.time[within], series.value[within]
