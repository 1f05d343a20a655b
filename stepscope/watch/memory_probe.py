"""Measure the memory of a training's first steps, and on a GPU how much larger a batch may be.

`StepMemoryProbe` measures a script: a hook after each `step` of torch's optimizers reads the
counters of torch's allocator, or on a CPU the growth of the process's memory since the import of
torch. It sums the unique storages of parameters, gradients and optimizer states.
`trainer/memory_estimate` measures the built-in workloads with the same readings.
"""

from __future__ import annotations

import contextlib
import logging
import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any, NoReturn

import psutil

from stepscope.common.formatting import format_bytes
from stepscope.host.usage import container
from stepscope.memory import allocator
from stepscope.memory.model_states import (
    StorageBytes,
    gradients,
    optimizer_parameters,
    optimizer_state,
)
from stepscope.watch.hooks.patching import PostImportHook

log = logging.getLogger(__name__)

HEADROOM = 0.10  # Fraction of the memory that a larger batch leaves free.
MIN_GROWING = 0.1  # Minimum of the peak that grows with a batch, as a fraction of it.
_CLEAR = Path("/proc/self/clear_refs")
_PEAK_ONLY = "5"
"""Value for clear_refs that resets the peak of the resident memory (man proc_pid_clear_refs)."""


@dataclass(frozen=True, slots=True)
class UsedMemory:
    """Bytes of torch's allocator, or of this process on a CPU, where reserved ones are None.

    Peaks are those since `reset_peak`.
    """

    now: int
    peak: int
    reserved: int | None = None
    peak_reserved: int | None = None


def used_memory(cuda_index: int | None) -> UsedMemory:
    """Read the memory in use on a CUDA device, or by this process (None)."""
    if cuda_index is None:
        now = int(psutil.Process().memory_info().rss)
        return UsedMemory(now, max(_process_peak(), now))
    counters = allocator.read(cuda_index)
    return UsedMemory(
        now=int(counters["memory/allocated"]),
        peak=int(counters["memory/peak_allocated"]),
        reserved=int(counters["memory/reserved"]),
        peak_reserved=int(counters["memory/peak_reserved"]),
    )


def reset_peak(cuda_index: int | None) -> None:
    """Let the peaks of `used_memory` begin now."""
    if cuda_index is not None:
        sys.modules["torch"].cuda.reset_peak_memory_stats(cuda_index)
        return
    with contextlib.suppress(OSError):
        _CLEAR.write_text(_PEAK_ONLY)


def free_memory(cuda_index: int | None) -> int:
    """Return the free bytes of a CUDA device, or of the host within its container's limit."""
    if cuda_index is None:
        return container().within(int(psutil.virtual_memory().available))
    return int(sys.modules["torch"].cuda.mem_get_info(cuda_index)[0])


def _process_peak() -> int:
    """Return the peak of the process's resident bytes since the last reset; 0 if unknown."""
    with contextlib.suppress(OSError, ValueError):
        for line in Path("/proc/self/status").read_text().splitlines():
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) * 1024
    return 0


@dataclass(frozen=True, kw_only=True, slots=True)
class StepMemory:
    """Bytes of one step on a device (None: the host); peaks are those since the step before."""

    cuda_index: int | None = None
    used: UsedMemory  # After the update; on the host without `base`.
    free: int  # Of the device.
    parameters: int
    gradients: int
    state: int
    base: int = 0  # Bytes of the process before the training.

    @property
    def growing(self) -> int:
        """Bytes that may depend on the batch: all but weights, gradients and optimizer state."""
        return max(0, self.used.peak - self.parameters - self.gradients - self.state)

    @property
    def available(self) -> int:
        """Bytes available to this process: its own and the free ones."""
        own = self.used.now + self.base if self.used.reserved is None else self.used.reserved
        return self.free + own

    def parts(self) -> dict[str, int]:
        """Return the bytes of the peak by category."""
        return {
            "trained_parameters": self.parameters,
            "gradients": self.gradients,
            "optimizer_state": self.state,
            "activations_and_the_rest": self.growing,
        }


def largest_step(steps: Sequence[StepMemory]) -> StepMemory:
    """Return the step with the largest peak, without the first one.

    The first has no optimizer state before its update, and one-time allocations.
    """
    return max(steps[1:] or steps, key=lambda step: step.used.peak)


def batch_headroom(steps: Sequence[StepMemory]) -> tuple[float | None, str]:
    """Return how many times as large the batch may be, and a sentence; needs a step.

    Returns None with the reason on a CPU, for a batch that is too large already, and for steps that
    are few, differ, or hardly depend on the batch.
    """
    largest = largest_step(steps)
    peak, reserved = largest.used.peak, largest.used.peak_reserved
    growing = [step.growing for step in steps[1:]]
    if reserved is None:
        return None, "No factor for the batch: it needs torch's allocator of a GPU."
    if not growing:
        return None, "No factor for the batch: it needs two steps."
    if min(growing) < MIN_GROWING * peak:
        return None, (
            "No factor for the batch: besides the weights, the steps need "
            f"{format_bytes(min(growing))} to {format_bytes(max(growing))} of a peak of "
            f"{format_bytes(peak)}."
        )
    # The allocator reserves more than it allocates, in proportion.
    allowed = largest.available * (1 - HEADROOM) * min(1.0, peak / reserved)
    if allowed < peak:
        return None, f"This batch leaves less than {HEADROOM:.0%} free. Try a smaller one."
    factor = 1 + (allowed - peak) / largest.growing
    shown = f"{factor:.1f}" if factor < 10 else f"{factor:.0f}"
    return factor, (
        f"The batch can be about {shown}× as large and still leave {HEADROOM:.0%} free, assuming "
        "the whole peak except trained parameters, gradients and optimizer state "
        f"({format_bytes(largest.growing)}) scales with it."
    )


class StepMemoryProbe:
    """Measures the first `wanted` steps, after `start` and the script's import of torch.

    `ended` is called after the last step, or if one cannot be measured; it ends the process.
    `refused` is the reason why the steps cannot be measured, or None.
    """

    def __init__(self, wanted: int, ended: Callable[[], NoReturn]) -> None:
        self.steps: list[StepMemory] = []
        self.refused: str | None = None
        self.has_torch = False
        self._wanted = wanted
        self._ended = ended
        self._pid = os.getpid()
        self._base = 0

    def start(self) -> None:
        PostImportHook("torch", self._attach).start()

    def _attach(self, torch: ModuleType) -> None:
        self.has_torch = True
        self._base = used_memory(None).now
        module = import_module("torch.optim.optimizer")
        module.register_optimizer_step_post_hook(self._after_step)

    def _after_step(self, optimizer: Any, *_: Any) -> None:
        if os.getpid() != self._pid:  # a forked child
            return
        try:
            self._measure(optimizer)
        except Exception as error:  # must not reach the script
            self.refused = f"The steps cannot be measured: {type(error).__name__}: {error}."
            log.debug("stepscope: %s", self.refused, exc_info=True)
        if self.refused is not None or len(self.steps) >= self._wanted:
            self._ended()

    def _measure(self, optimizer: Any) -> None:
        """Add a step, whose gradients are still allocated."""
        parameters = list(optimizer_parameters([optimizer]))
        index = cuda_index(parameters)
        weights = StorageBytes(index)
        weights.add(parameters)
        held = StorageBytes(index, weights)
        held.add(gradients(parameters))
        state = StorageBytes(index, weights)
        state.add(optimizer_state([optimizer]))
        used = used_memory(index)
        base = self._base if index is None else 0
        self.steps.append(
            StepMemory(
                cuda_index=index,
                used=replace(used, now=used.now - base, peak=used.peak - base),
                free=free_memory(index),
                parameters=weights.bytes,
                gradients=held.bytes,
                state=state.bytes,
                base=base,
            )
        )
        reset_peak(index)


def cuda_index(parameters: list[Any]) -> int | None:
    """Return the index of the CUDA device of all parameters, None for the host.

    Raises ValueError for several devices, and others than CPU and CUDA.
    """
    devices = {str(one.device): one.device for one in parameters}
    if len(devices) != 1 or not {one.type for one in devices.values()} <= {"cpu", "cuda"}:
        raise ValueError(f"the model lies on {', '.join(sorted(devices))}; measure a part of it")
    (device,) = devices.values()
    return int(device.index) if device.type == "cuda" else None


def device_name(index: int | None) -> str:
    return "the CPU" if index is None else str(sys.modules["torch"].cuda.get_device_name(index))
