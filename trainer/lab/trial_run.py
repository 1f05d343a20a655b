"""A trial: an ordinary run with recorder and sampler, and its metrics."""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from stepscope.common.config_issue import ConfigError
from stepscope.lab.measurement import RunTooShortError, measured
from stepscope.run import RunError, RunStatus, read_run
from stepscope.store import StoreError
from stepscope.store.recorder import Recorder
from trainer.config import LRSchedule, NanPolicy, RunConfig, Runner, limits_of
from trainer.lab.plan import changed
from trainer.runners.child_process import last_step, write_pending
from trainer.runners.torchrun import TorchrunRun
from trainer.runners.training_run import run

POLL_S = 0.02
STOP_S = 30.0  # Timeout for the end of the ranks after their time limit.


def run_trial(job: Mapping[str, Any]) -> dict[str, Any]:
    """Run the job; return `metrics` and `machine`, or a `reason`.

    A job has `config`, `changes`, `seed`, `warmup`, `steps`, and an empty `folder`. Without `steps`
    the run ends `seconds` after its warm-up. `stops`: the folder cannot be written.
    """
    folder, warmup, seconds = Path(job["folder"]), int(job["warmup"]), float(job["seconds"])
    if job["steps"]:
        seconds = math.inf
    expected = {RunStatus.FINISHED} if job["steps"] else {RunStatus.FINISHED, RunStatus.STOPPED}
    try:
        config = _config(job)
        if config.distributed:
            write_pending(folder, config, "Starting the ranks.")
            ranks = TorchrunRun(config, folder)
            _wait(lambda: last_step(ranks.folder), lambda: not ranks.alive(), warmup, seconds)
            while ranks.alive():
                ranks.stop(STOP_S)
        else:
            _run_here(config, folder, warmup, seconds)
        ended = read_run(folder)
        if ended.status not in expected:
            return {"reason": ended.reason or f"The run is {ended.status}."}
        metrics = measured(folder, warmup, config.world_size)
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
        epochs=int(limits_of("epochs")[1]),
        max_steps=job["steps"] and job["warmup"] + job["steps"],
        runner=Runner.TORCHRUN if config.distributed else Runner.THREAD,
        nan_policy=NanPolicy.CONTINUE,  # a NaN loss is a result, not a failure
        # A constant learning rate does not depend on the number of steps.
        lr_scheduler=LRSchedule.NONE,
        lr_warmup_steps=0,
        resume_from="",
    )


def _run_here(config: RunConfig, folder: Path, warmup: int, seconds: float) -> None:
    stop = threading.Event()
    recorders: list[Recorder] = []

    def watch() -> None:
        _wait(lambda: recorders[0].step if recorders else 0, stop.is_set, warmup, seconds)
        stop.set()

    if seconds < math.inf:
        threading.Thread(target=watch, daemon=True).start()
    try:
        run(config, folder, stop=stop, opened=recorders.append)
    finally:
        stop.set()


def _wait(step: Callable[[], int], ended: Callable[[], bool], warmup: int, seconds: float) -> None:
    """Wait for the end of the run, or for `seconds` after two steps beyond the warm-up."""
    until_s = math.inf
    while time.monotonic() < until_s and not ended():
        if until_s == math.inf and step() >= warmup + 2:
            until_s = time.monotonic() + seconds
        time.sleep(POLL_S)
