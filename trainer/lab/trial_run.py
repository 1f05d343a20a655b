"""A trial: an ordinary run with recorder and sampler, and its metrics."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from stepscope.common.config_issue import ConfigError
from stepscope.lab.measurement import RunTooShortError, measured
from stepscope.run import RunError, RunStatus, read_run
from stepscope.store import StoreError
from trainer.config import LRSchedule, NanPolicy, RunConfig, Runner, limits_of
from trainer.lab.plan import changed
from trainer.runners.child_process import TorchrunRun, write_pending
from trainer.runners.training_run import run

POLL_S = 0.02


def run_trial(job: Mapping[str, Any]) -> dict[str, Any]:
    """Run the job; return `metrics` and `machine`, or a `reason`.

    A job has `config`, `changes`, `seed`, `warmup`, `steps`, and an empty `folder`. `stops`: the
    folder cannot be written.
    """
    folder = Path(job["folder"])
    try:
        config = _config(job)
        if config.distributed:
            write_pending(folder, config, "Starting the ranks.")
            ranks = TorchrunRun(config, folder)
            while ranks.alive():
                time.sleep(POLL_S)
        else:
            run(config, folder)
        ended = read_run(folder)
        if ended.status is not RunStatus.FINISHED:
            return {"reason": ended.reason or f"The run is {ended.status}."}
        metrics = measured(folder, job["warmup"], config.world_size)
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
        max_steps=job["warmup"] + job["steps"],
        runner=Runner.TORCHRUN if config.distributed else Runner.THREAD,
        nan_policy=NanPolicy.CONTINUE,  # a NaN loss is a result, not a failure
        # A constant learning rate does not depend on the number of steps.
        lr_scheduler=LRSchedule.NONE,
        lr_warmup_steps=0,
        resume_from="",
    )
