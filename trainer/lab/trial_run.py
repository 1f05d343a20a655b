"""The training run of one sample: an ordinary run with recorder and sampler, as a user gets it."""

from __future__ import annotations

import threading
import time
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from stepscope.recorded_run import Run
from stepscope.recorder.recorder import Recorder
from stepscope.run import RunError, RunStatus
from stepscope.store import StoreError
from trainer.config import LIMITS, ConfigError, LRSchedule, NanPolicy, RunConfig, Runner
from trainer.lab.distributed_trial import taken_by_ranks
from trainer.lab.trial_metrics import RunTooShortError, measured
from trainer.lab.variants import changed
from trainer.training.train import run

POLL_S = 0.02


def run_trial(job: Mapping[str, Any]) -> dict[str, Any]:
    """Run the job; return `metrics` and `machine`, or the `reason` why there are none.

    A job has `config`, `changes`, `seed`, `warmup`, `steps`, and `folder`, which is empty. Without
    `steps` the run ends `seconds` after its warm-up. Where the folder cannot be written the answer
    has `stops` beside the reason.
    """
    try:
        return _taken(job)
    except (StoreError, OSError) as error:
        return {"reason": f"The sample's folder cannot be written: {error}.", "stops": True}


def _taken(job: Mapping[str, Any]) -> dict[str, Any]:
    folder, warmup, steps = Path(job["folder"]), int(job["warmup"]), int(job["steps"])
    try:
        config = changed(RunConfig.from_dict(job["config"]), job["changes"])
        config = replace(
            config,
            seed=int(job["seed"]),
            epochs=int(LIMITS["epochs"][1]),
            max_steps=warmup + steps if steps else 0,
            runner=Runner.TORCHRUN if config.distributed else Runner.THREAD,
            nan_policy=NanPolicy.CONTINUE,  # a loss that is no number is a finding, not a failure
            # A constant rate does not depend on how many steps a sample takes.
            lr_scheduler=LRSchedule.NONE,
            lr_warmup_steps=0,
            resume_from="",
        )
    except ConfigError as error:
        return {"reason": str(error)}
    if config.distributed:
        return taken_by_ranks(config, folder, warmup, 0.0 if steps else float(job["seconds"]))
    stop, clock = threading.Event(), _TrialTimer(warmup, float(job["seconds"]))
    clock.start(stop, wanted=not steps)
    try:
        status = run(config, folder, stop=stop, opened=clock.opened)
    finally:
        stop.set()
    if status is not RunStatus.FINISHED and not (status is RunStatus.STOPPED and not steps):
        return {"reason": Run(folder).run_json.get("reason") or f"The run is {status}."}
    try:
        metrics = measured(folder, warmup)
    except (RunTooShortError, RunError) as error:
        return {"reason": str(error)}
    return {"metrics": metrics, "machine": Run(folder).run_json.get("environment") or {}}


class _TrialTimer:
    """Ends a run of unknown step time some seconds after its warm-up, two steps after at least."""

    def __init__(self, warmup: int, seconds: float) -> None:
        self._warmup = warmup
        self._seconds = seconds
        self._recorder: Recorder | None = None

    def opened(self, recorder: Recorder) -> None:
        """Take the recorder, which counts the steps."""
        self._recorder = recorder

    def start(self, stop: threading.Event, *, wanted: bool) -> None:
        """Watch the steps in a thread of its own, if `wanted`."""
        if wanted:
            threading.Thread(
                target=self._watch, args=(stop,), name="lab-clock", daemon=True
            ).start()

    def _watch(self, stop: threading.Event) -> None:
        while self._step() < self._warmup:
            if stop.wait(POLL_S):
                return
        ends = time.monotonic() + self._seconds
        while time.monotonic() < ends or self._step() < self._warmup + 2:
            if stop.wait(POLL_S):
                return
        stop.set()

    def _step(self) -> int:
        return 0 if self._recorder is None else self._recorder.step
