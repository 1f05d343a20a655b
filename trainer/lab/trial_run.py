"""A trial: an ordinary run with recorder and sampler, and its metrics.

Steps are not independent: workers deliver batches in bursts, and an epoch starts slowly. So the
rate is the median over blocks of many steps; docs/lab.md explains what it does not include.
"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from stepscope.gpu.device_events import throttle_words
from stepscope.recorded_run import Run, open_run
from stepscope.recorder.recorder import Recorder
from stepscope.run import RunError, RunStatus, read_run
from stepscope.store import StoreError
from trainer.config import LIMITS, ConfigError, LRSchedule, NanPolicy, RunConfig, Runner
from trainer.lab.variants import changed
from trainer.runners.process import last_step, write_pending
from trainer.runners.torchrun import TorchrunRun
from trainer.training.train import run

POLL_S = 0.02
STOP_S = 30.0  # Timeout for the end of the ranks after their time limit.
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
LOSS_FRACTION = 0.2  # The loss is the mean over this last fraction of the measured steps.

Floats = NDArray[np.float64]


def run_trial(job: Mapping[str, Any]) -> dict[str, Any]:
    """Run the job; return `metrics` and `machine`, or a `reason`.

    A job has `config`, `changes`, `seed`, `warmup`, `steps`, and an empty `folder`. Without `steps`
    the run ends `seconds` after its warm-up. If the folder cannot be written, the result has
    `stops` too.
    """
    folder, warmup, seconds = Path(job["folder"]), int(job["warmup"]), float(job["seconds"])
    timed = not job["steps"]
    try:
        config = _config(job)
        if config.distributed:
            write_pending(folder, config, "Starting the ranks.")
            ranks = TorchrunRun(config, folder)
            limit_s = seconds if timed else float("inf")
            _wait(lambda: last_step(ranks.folder), lambda: not ranks.alive(), warmup, limit_s)
            while ranks.alive():
                ranks.stop(STOP_S)
        else:
            _run_here(config, folder, warmup, seconds, timed=timed)
        ended = read_run(folder)
        if ended.status is not RunStatus.FINISHED and not (
            timed and ended.status is RunStatus.STOPPED
        ):
            return {"reason": ended.reason or f"The run is {ended.status}."}
        try:
            metrics = measured(folder, warmup, config.world_size)
        except StoreError as error:
            if not config.distributed:
                raise
            return {"reason": str(error)}  # a rank's store is unreadable: the trial failed
        return {"metrics": metrics, "machine": ended.run_json.get("environment") or {}}
    except (ConfigError, RunTooShortError, RunError) as error:
        return {"reason": str(error)}
    except (StoreError, OSError) as error:
        return {"reason": f"The folder of the trial cannot be written: {error}.", "stops": True}


def _config(job: Mapping[str, Any]) -> RunConfig:
    config = changed(RunConfig.from_dict(job["config"]), job["changes"])
    return replace(
        config,
        seed=int(job["seed"]),
        epochs=int(LIMITS["epochs"][1]),
        max_steps=job["steps"] and job["warmup"] + job["steps"],
        runner=Runner.TORCHRUN if config.distributed else Runner.THREAD,
        nan_policy=NanPolicy.CONTINUE,  # a NaN loss is a result, not a failure
        # A constant learning rate does not depend on the number of steps.
        lr_scheduler=LRSchedule.NONE,
        lr_warmup_steps=0,
        resume_from="",
    )


def _run_here(config: RunConfig, folder: Path, warmup: int, seconds: float, *, timed: bool) -> None:
    stop, recorders = threading.Event(), list[Recorder]()

    def watch() -> None:
        _wait(lambda: recorders[0].step if recorders else 0, stop.is_set, warmup, seconds)
        stop.set()

    if timed:
        threading.Thread(target=watch, name="lab-clock", daemon=True).start()
    try:
        run(config, folder, stop=stop, opened=recorders.append)
    finally:
        stop.set()


def _wait(step: Callable[[], int], ended: Callable[[], bool], warmup: int, seconds: float) -> None:
    """Wait for the end of the run, or for `seconds` after two steps beyond the warm-up."""
    while step() < warmup + 2:
        if ended():
            return
        time.sleep(POLL_S)
    until = time.monotonic() + seconds
    while time.monotonic() < until and not ended():
        time.sleep(POLL_S)


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
    """Return the first step of each whole epoch, and the end of the last one.

    The first epoch is cut by the warm-up, the last by the end of the run.
    """
    return np.flatnonzero(np.diff(epochs)) + 1


def burst_cuts(seconds: Floats) -> NDArray[np.intp]:
    """Return the first step of each block, and the end of the last one.

    A cut is the end of the slowest step near an even cut. A burst of fast steps follows the slow
    step that waited for it, so each block has the slow steps of its fast ones.
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

    Of several ranks: the total rate, the largest memory, and mean times. The loss and the GPU's
    clock and power are those of rank 0; energy is missing. Missing values are None. Raises
    RunTooShortError, RunError and StoreError.
    """
    runs = [open_run(folder, rank=rank) for rank in range(ranks)]
    each = [Steps(run, warmup) for run in runs]
    seconds, samples = steps_together(each)
    total, window = float(samples.sum()), float(seconds.sum())
    per_second = rate(seconds, samples, each[0].epochs[: len(seconds)])
    losses = each[0].of("train/loss")
    losses = losses[-math.ceil(len(losses) * LOSS_FRACTION) :]
    finite = bool(np.isfinite(losses).all())
    return {
        "samples_per_sec": per_second,
        "mean_samples_per_sec": total / window,
        "step_time": total / len(seconds) / per_second,
        "steps": len(seconds),
        "window_s": window,
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
        **_device(runs[0], each[0], total if ranks == 1 else None),
    }


def steps_together(ranks: list[Steps]) -> tuple[Floats, Floats]:
    """Return seconds and samples of each step of all ranks.

    A step ends when all ranks have ended it. The window begins with the last rank's end of the
    warm-up: the average of the gradients is a barrier in each step. Time between two steps, such as
    validation, is excluded.
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
        self._rows = timed[timed >= (timed[warmup] if warmup < len(timed) else len(series.value))]
        if len(self._rows) < 2:
            raise RunTooShortError(
                f"The run made {len(timed)} steps, {warmup} of them warm-up: none is left to "
                "measure. Increase the epochs or reduce the warm-up steps."
            )
        self.times = series.time[self._rows]
        self.seconds = series.value[self._rows]
        self.samples = self.of("perf/samples_per_sec") * self.seconds
        self.epochs = self.of("train/epoch")
        self.began = float(series.time[self._rows[0]] - self.seconds[0])
        self.ended = float(series.time[self._rows[-1]])

    def of(self, key: str) -> Floats:
        """Return a metric of these steps, NaN if missing."""
        values = _values(self._run, key)
        return values[self._rows] if len(values) else np.full(len(self._rows), np.nan)


def _device(run: Run, steps: Steps, samples: float | None) -> dict[str, Any]:
    """Return NVML's values during the measured steps; all None on a CPU.

    The energy is per sample, of `samples` in total.
    """
    masks = _during(run, "gpu/throttle_reasons", steps)[1]
    words = {word for mask in masks for word in throttle_words(int(mask))}
    times, energy = _during(run, "gpu/energy", steps)
    joules = None
    if samples and len(energy) > 1:
        # The mean power between two readings, for the duration of the steps.
        watts = (energy[-1] - energy[0]) / (times[-1] - times[0])
        joules = float(watts * steps.seconds.sum() / samples)
    return {
        "sm_clock": _reduced(np.mean, _during(run, "gpu/sm_clock", steps)[1]),
        "power": _reduced(np.mean, _during(run, "gpu/power", steps)[1]),
        "throttle": ", ".join(sorted(words)) or None,
        "energy_per_sample": joules,
    }


def _during(run: Run, key: str, steps: Steps) -> tuple[Floats, Floats]:
    """Return times and values of the first GPU's metric during the measured steps."""
    if key not in run.metrics or not run.gpus:
        return np.array([]), np.array([])
    series = run.series(key, run.gpus[0])
    within = (series.time >= steps.began) & (series.time <= steps.ended)
    within &= np.isfinite(series.value)
    return series.time[within], series.value[within]
