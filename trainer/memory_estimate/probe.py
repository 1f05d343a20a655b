"""One probe: train for three steps in this process, and measure the memory.

The training is that of `trainer/train.py`. The probe ends it after the first batch of the
validation that follows the steps.
"""

from __future__ import annotations

import contextlib
import resource
import time
from collections.abc import Callable
from dataclasses import replace
from itertools import chain
from pathlib import Path
from typing import Any

import psutil

from stepscope.gpu.source import is_simulated
from stepscope.lab.measurement import measured
from stepscope.memory.model_states import StorageBytes, optimizer_state
from stepscope.recorded_run import open_run
from stepscope.run import read_run
from stepscope.watch.memory_probe import free_memory, reset_peak, used_memory
from trainer.config import NanPolicy, RunConfig, Runner, limits_of
from trainer.errors import RunFailedError
from trainer.memory_estimate import ProbeError
from trainer.runners.training_run import run
from trainer.training.config_validation import TrainDevice
from trainer.training.state import TrainState

STEPS = 3
"""Steps with optimizer state. fp16 skips the first updates, and with them the state."""
WARMUP_STEPS = 1  # Steps that the throughput does not count.

Progress = Callable[[str, float], None]  # Called with the current activity and the fraction done.


class _MeasuredError(RunFailedError):
    """Ends the training after the last step of the probe."""


class _StepBoundary:
    """Called at each step boundary of the training; `result` is set at the last one."""

    def __init__(self, device: TrainDevice, seconds: float, progress: Progress) -> None:
        self.result: dict[str, Any] | None = None
        self._index = device.cuda_index
        self._seconds = seconds
        self._progress = progress
        self._step = 0
        self._steps_with_state = 0
        self._has_steps = False
        self._warm_since = 0.0
        self._free_before = 0  # on a CPU only, as is the next
        self._used_before = 0
        if self._index is None:
            self._free_before = free_memory(None)
            self._used_before = used_memory(None).now
            _limit_host_memory(self._free_before)
            reset_peak(None)

    def __call__(self, training: TrainState) -> None:
        """Count a step. Raises _MeasuredError after the first batch of the validation."""
        if self._has_steps:
            training.compute.synchronize()
            self.result = self._measure(training)
            raise _MeasuredError("The probe has measured its steps.")
        if training.step == self._step:  # within the validation of an earlier epoch
            return
        self._step = training.step
        if self._step == WARMUP_STEPS:
            self._warm_since = time.monotonic()
        self._steps_with_state += bool(training.optimizer.state)
        self._progress(f"Step {self._step}", 0.4 + 0.5 * min(1.0, self._steps_with_state / STEPS))
        warm_s = time.monotonic() - self._warm_since
        if self._steps_with_state >= STEPS and warm_s >= self._seconds:
            self._has_steps = True
            training.end_here()

    def _measure(self, training: TrainState) -> dict[str, Any]:
        used = used_memory(self._index)
        peak = used.peak - self._used_before
        free = self._free_before - peak if self._index is None else free_memory(self._index)
        weights = StorageBytes(self._index)
        weights.add(chain(training.model.parameters(), training.model.buffers()))
        state = StorageBytes(self._index, weights)
        state.add(optimizer_state([training.optimizer]))
        return {
            "steps": self._step,
            "measured_peak_bytes": peak,
            "measured_reserved_bytes": used.peak_reserved,
            "parts": {
                "parameters_and_buffers": weights.bytes,
                "optimizer_state": state.bytes,
                "gradients_activations_and_the_rest": max(0, peak - weights.bytes - state.bytes),
            },
            "free_bytes": max(0, free),
            "samples": training.samples,
        }


def measure(
    config: RunConfig, device: TrainDevice, folder: Path, *, seconds: float, progress: Progress
) -> dict[str, Any]:
    """Train in `folder` for three steps and at least `seconds`; return the memory as JSON values.

    `fits` is False, with a `reason`, if memory ran out. Raises ProbeError for any other end,
    OSError and StoreError.
    """
    progress("Building the workload", 0.3)
    boundary = _StepBoundary(device, seconds, progress)
    endless = replace(
        config,
        epochs=int(limits_of("epochs")[1]),
        max_steps=0,
        runner=Runner.PROCESS,
        nan_policy=NanPolicy.CONTINUE,
        resume_from="",
    )
    run(endless, folder, at_boundary=boundary)
    found: dict[str, Any] = {
        "fits": True,
        "reason": None,
        "batch_size": config.batch_size,
        "device_name": device.name,
        "samples_per_sec": None,
    }
    if boundary.result is None:
        reason = read_run(folder).reason or "The training ended without a step."
        if not any(event.kind == "oom" for event in open_run(folder).events()):
            raise ProbeError(reason)
        found |= {"fits": False, "reason": reason}
    else:
        rate = measured(folder, WARMUP_STEPS)
        found |= boundary.result
        found["step_s"] = rate["step_time"]
        found["samples_per_sec"] = None if is_simulated(device.id) else rate["samples_per_sec"]
    return found


def _limit_host_memory(free: int) -> None:
    """Let allocations beyond the free memory fail, before the kernel kills a process for it."""
    hard = resource.getrlimit(resource.RLIMIT_DATA)[1]
    with contextlib.suppress(AttributeError, OSError, ValueError):  # no Linux, or a lower limit
        taken = psutil.Process().memory_info().data
        resource.setrlimit(resource.RLIMIT_DATA, (taken + free, hard))
