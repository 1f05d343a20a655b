"""The training run of a trial: an ordinary run with recorder and sampler, as a user gets it."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from stepscope.recorder.recorder import Recorder
from stepscope.run import RunError, RunStatus, read_run
from stepscope.store import StoreError
from trainer.config import LIMITS, ConfigError, LRSchedule, NanPolicy, RunConfig, Runner
from trainer.lab.trial_metrics import RunTooShortError, measured
from trainer.lab.variants import changed
from trainer.runners.process import last_step, write_pending
from trainer.runners.torchrun import TorchrunRun
from trainer.training.train import run

POLL_S = 0.02
STOP_S = 30.0  # Longest wait for the ranks to end where their time is up.


def run_trial(job: Mapping[str, Any]) -> dict[str, Any]:
    """Run the job; return `metrics` and `machine`, or the `reason` why there are none.

    A job has `config`, `changes`, `seed`, `warmup`, `steps`, and `folder`, which is empty. Without
    `steps` the run ends `seconds` after its warm-up. Where the folder cannot be written the answer
    has `stops` beside the reason.
    """
    folder, warmup = Path(job["folder"]), int(job["warmup"])
    timed = not job["steps"]
    try:
        config = _config(job)
        if config.distributed:
            write_pending(folder, config, "Starting the ranks.")
            _run_ranks(TorchrunRun(config, folder), warmup, float(job["seconds"]), timed=timed)
        else:
            _run_here(config, folder, warmup, float(job["seconds"]), timed=timed)
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
            return {"reason": str(error)}  # a rank's store cannot be read: this trial failed
        return {"metrics": metrics, "machine": ended.run_json.get("environment") or {}}
    except (ConfigError, RunTooShortError, RunError) as error:
        return {"reason": str(error)}
    except (StoreError, OSError) as error:
        return {"reason": f"The sample's folder cannot be written: {error}.", "stops": True}


def _config(job: Mapping[str, Any]) -> RunConfig:
    config = changed(RunConfig.from_dict(job["config"]), job["changes"])
    return replace(
        config,
        seed=int(job["seed"]),
        epochs=int(LIMITS["epochs"][1]),
        max_steps=job["steps"] and job["warmup"] + job["steps"],
        runner=Runner.TORCHRUN if config.distributed else Runner.THREAD,
        nan_policy=NanPolicy.CONTINUE,  # a loss that is no number is a finding, not a failure
        # A constant rate does not depend on how many steps a sample takes.
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


def _run_ranks(job: TorchrunRun, warmup: int, seconds: float, *, timed: bool) -> None:
    _wait(
        lambda: last_step(job.folder),
        lambda: not job.alive(),
        warmup,
        seconds if timed else float("inf"),
    )
    while job.alive():
        job.stop(STOP_S)


def _wait(step: Callable[[], int], ended: Callable[[], bool], warmup: int, seconds: float) -> None:
    """Wait until the run has ended, or for `seconds` after two steps beyond the warm-up."""
    while step() < warmup + 2:
        if ended():
            return
        time.sleep(POLL_S)
    until = time.monotonic() + seconds
    while time.monotonic() < until and not ended():
        time.sleep(POLL_S)
