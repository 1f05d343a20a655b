"""A sample of several ranks: torchrun trains, and the steps of all ranks are measured together."""

from __future__ import annotations

import contextlib
import time
from pathlib import Path
from typing import Any

import numpy as np

from stepscope.recorded_run import open_run
from stepscope.run import RunError, RunStatus, read_run
from stepscope.store import StoreError
from trainer.config import RunConfig
from trainer.lab.trial_metrics import RunTooShortError, Steps, measured, rate
from trainer.runners import write_pending
from trainer.runners.torchrun import TorchrunRun

POLL_S = 0.1
STOP_S = 30.0
"""Longest wait for the ranks to end where their time is up."""
HIGHEST = ("peak_allocated", "peak_reserved", "peak_process")
MEAN = ("data_wait", "h2d", "gpu_time", "mfu")


def taken_by_ranks(config: RunConfig, folder: Path, warmup: int, seconds: float) -> dict[str, Any]:
    """Train with the ranks of `config`; return `metrics` and `machine`, or the `reason`.

    Without a limit of steps the ranks are stopped `seconds` after the warm-up. Raises OSError.
    """
    write_pending(folder, config)
    job = TorchrunRun(config, folder)
    _wait(job, folder, warmup, seconds)
    try:
        run = read_run(folder)
        by_time = run.status is RunStatus.STOPPED and seconds > 0
        if run.status is not RunStatus.FINISHED and not by_time:
            return {"reason": run.reason or f"The run is {run.status}."}
        metrics = measured_together(folder, warmup, config.world_size)
    except (RunTooShortError, RunError, StoreError) as error:
        return {"reason": str(error)}
    return {"metrics": metrics, "machine": run.run_json.get("environment") or {}}


def measured_together(folder: Path, warmup: int, ranks: int) -> dict[str, Any]:
    """Return the metrics of a job's run: its rate, and the memory of the rank that needs most.

    A step counts once all ranks have made it, and has the samples of all. The window begins with
    the last rank's end of the warm-up: averaging the gradients is a barrier in each step.
    What only one GPU tells (clock, power) is that of rank 0; energy is missing.
    Raises TooShort, RunError and StoreError.
    """
    each = [measured(folder, warmup, rank) for rank in range(ranks)]
    seconds, samples, epochs = _together(
        [Steps(open_run(folder, rank=rank), warmup) for rank in range(ranks)]
    )
    total, per_second = float(samples.sum()), rate(seconds, samples, epochs)
    return {
        **each[0],
        "samples_per_sec": per_second,
        "mean_samples_per_sec": total / float(seconds.sum()),
        "step_time": total / len(seconds) / per_second,
        "steps": len(seconds),
        "window_s": float(seconds.sum()),
        **{name: _over(max, each, name) for name in HIGHEST},
        **{name: _over(np.mean, each, name) for name in MEAN},
        "energy_per_sample": None,
    }


def _together(ranks: list[Steps]) -> tuple[Any, Any, Any]:
    """Return seconds, samples and epoch of each step of all ranks.

    The time between two steps that is no step, such as validation, is left out as in one rank.
    """
    count = min(len(steps.seconds) for steps in ranks)
    ended = np.max([steps.times[:count] for steps in ranks], axis=0)
    own = np.max([steps.seconds[:count] for steps in ranks], axis=0)
    seconds = own.copy()
    seconds[1:] = np.minimum(np.diff(ended), own[1:])
    samples = np.sum([steps.samples[:count] for steps in ranks], axis=0)
    return seconds, samples, ranks[0].epochs[:count]


def _over(of: Any, each: list[dict[str, Any]], name: str) -> float | None:
    known = [metrics[name] for metrics in each if metrics[name] is not None]
    return float(of(known)) if known else None


def _wait(job: TorchrunRun, folder: Path, warmup: int, seconds: float) -> None:
    """Wait for the end of all ranks; with `seconds` end them so long after the warm-up."""
    ends: float | None = None
    while job.alive():
        time.sleep(POLL_S)
        if seconds <= 0:
            continue
        if ends is None and _step(folder) >= warmup + 2:
            ends = time.monotonic() + seconds
        if ends is not None and time.monotonic() >= ends:
            job.stop(STOP_S)


def _step(folder: Path) -> int:
    with contextlib.suppress(RunError, TypeError, ValueError):
        return int(read_run(folder).run_json.get("step", 0))
    return 0
