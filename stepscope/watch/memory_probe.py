"""Measure the memory of a training's first steps, and the headroom for a larger batch.

`StepMemoryProbe` measures a script: hooks before and after each `step` of torch's optimizers read
the counters of torch's allocator, or on a CPU the process's memory. They sum the unique storages
of parameters, gradients and optimizer states. The script ends like by `sys.exit(0)` after the last
requested step, or if one cannot be measured. `trainer/memory_estimate` measures the built-in
workloads with the same readings.

Weights, gradients and optimizer state do not depend on the batch. All other bytes of the peak are
assumed to grow in proportion to it. If the batch has to shrink, only bytes that the update frees
are assumed to shrink. So a factor is rather too small than too large.
"""

from __future__ import annotations

import contextlib
import ctypes
import logging
import os
import sys
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any, NoReturn

import psutil

from stepscope.common.formatting import format_bytes
from stepscope.host.usage import container
from stepscope.memory import allocator, model_states
from stepscope.memory.model_states import (
    StorageBytes,
    gradients,
    optimizer_parameters,
    optimizer_state,
)
from stepscope.watch.hooks.patching import PostImportHook

log = logging.getLogger(__name__)

HEADROOM = 0.10  # Fraction of the memory that a larger batch leaves free.
MIN_REST_BYTES = 16 * 2**20  # Minimum of the peak that grows with a batch.
MIN_REST_FRACTION = 0.02
MAX_DIFFERENCE = 0.25  # Between comparable steps, as a fraction of the largest.
MAX_FACTOR = 1000.0
_STATUS = Path("/proc/self/status")
_CLEAR = Path("/proc/self/clear_refs")
_PEAK_ONLY = "5"
"""Value for clear_refs that resets the peak of the resident memory (man proc_pid_clear_refs)."""
_M_MMAP_THRESHOLD = -3  # <malloc.h>
_LARGE_BLOCK_BYTES = 128 * 1024  # glibc's first limit


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
        peak = process_peak()
        now = int(psutil.Process().memory_info().rss)
        return UsedMemory(now, max(peak, now))
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


def process_peak(status: Path = _STATUS) -> int:
    """Return the peak of the process's resident bytes since the last reset."""
    with contextlib.suppress(OSError, ValueError):
        for line in status.read_text().splitlines():
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) * 1024
    return int(psutil.Process().memory_info().rss)


@dataclass(frozen=True, kw_only=True, slots=True)
class StepMemory:
    """Bytes of one step on a device (None: the host); peaks are those since the step before."""

    cuda_index: int | None = None
    used: UsedMemory  # After the update.
    free: int  # Of the device.
    parameters: int
    gradients: int
    state: int
    optimizer: int = 0  # The index of the optimizer that was stepped.
    waiting: int = 0  # Optimizers of other parameters that were not stepped yet.

    @property
    def fixed(self) -> int:
        """Bytes that do not depend on the batch."""
        return self.parameters + self.gradients + self.state

    @property
    def freed(self) -> int:
        """Bytes that the step allocates and frees."""
        return self.used.peak - self.used.now

    @property
    def growing(self) -> int:
        """Bytes that may depend on the batch."""
        return self.used.peak - self.fixed

    @property
    def available(self) -> int:
        """Bytes available to this process: its own and the free ones."""
        own = self.used.now if self.used.reserved is None else self.used.reserved
        return self.free + own

    def parts(self) -> dict[str, int]:
        """Return the bytes of the peak by category."""
        return {
            "trained_parameters": self.parameters,
            "gradients": self.gradients,
            "optimizer_state": self.state,
            "others_kept": max(0, self.used.now - self.fixed),
            "activations_and_the_rest": max(0, self.freed),
        }


@dataclass(frozen=True, slots=True)
class BatchHeadroom:
    """How much larger a batch can be; `factor` is None for the reason in `text`."""

    factor: float | None
    text: str


def largest_step(steps: Sequence[StepMemory]) -> StepMemory:
    """Return the step with the largest peak, without the first one.

    The first has no optimizer state before its update, and one-time allocations.
    """
    return max(steps[1:] or steps, key=lambda step: step.used.peak)


def batch_headroom(steps: Sequence[StepMemory]) -> BatchHeadroom:
    """Return the headroom for a larger batch; needs a step."""
    largest = largest_step(steps)
    reason = _no_factor_reason(steps, largest)
    if reason is not None:
        return BatchHeadroom(None, f"No factor for the batch: {reason}.")
    peak, reserved = largest.used.peak, largest.used.peak_reserved
    # The allocator reserves more than it allocates, in proportion.
    overhead = 1.0 if reserved is None else max(1.0, reserved / peak)
    allowed = largest.available * (1 - HEADROOM) / overhead
    if allowed < peak:  # the cautious assumption is that little shrinks with the batch
        factor = max(0.0, (allowed - largest.used.now) / largest.freed)
        return BatchHeadroom(
            factor,
            f"This batch leaves less than {HEADROOM:.0%} free. About {factor:.2g}× this batch size "
            "would fit, assuming only memory freed by each update "
            f"({format_bytes(largest.freed)}) shrinks with it.",
        )
    factor = min(MAX_FACTOR, (allowed - largest.fixed) / largest.growing)
    shown = f"{factor:.1f}" if factor < 10 else f"{factor:.0f}"
    return BatchHeadroom(
        factor,
        f"The batch can be about {shown}× as large and still leave {HEADROOM:.0%} free, assuming "
        "the whole peak except trained parameters, gradients and optimizer state "
        f"({format_bytes(largest.growing)}) scales with it.",
    )


def _no_factor_reason(steps: Sequence[StepMemory], largest: StepMemory) -> str | None:
    if len(steps) < 2:
        return "only one step was measured, and the first is not representative"
    if len({step.optimizer for step in steps}) > 1 or steps[-1].waiting:
        return "several optimizers take turns, so their steps are not comparable"
    before, last = steps[-2].state, steps[-1].state
    if before < (1 - MIN_REST_FRACTION) * last:
        return "the optimizer state still grew at the last step. Measure more steps with --steps"
    peak = largest.used.peak
    if largest.freed < max(MIN_REST_BYTES, MIN_REST_FRACTION * peak):
        return (
            f"activations and other memory are only {format_bytes(max(0, largest.freed))} of a "
            f"peak of {format_bytes(peak)}"
        )
    for sizes in ([step.freed for step in steps[1:]], [step.growing for step in steps[1:]]):
        if min(sizes) < (1 - MAX_DIFFERENCE) * max(sizes):
            return (
                f"the steps differ ({format_bytes(max(0, min(sizes)))} to "
                f"{format_bytes(max(sizes))} besides the weights)"
            )
    return None


class MeasurementDone(SystemExit):
    """Raised into the script after its first steps, or if they cannot be measured."""


class _CannotBeMeasured(Exception):
    """The script's steps are not supported; the message is a sentence."""


class StepMemoryProbe:
    """Measures the first `wanted` steps, after `start` and the script's import of torch.

    `refused` is the reason why the steps cannot be measured, or None. `ended` is called before
    `os._exit`, which ends a script that catches SystemExit or trains in another thread.
    """

    def __init__(self, wanted: int, ended: Callable[[], None]) -> None:
        self.steps: list[StepMemory] = []
        self.refused: str | None = None
        self.has_torch = False
        self._wanted = wanted
        self._ended = ended
        self._has_raised = False
        self._parameters = 0
        self._gradients = 0
        self._pid = os.getpid()
        self._optimizers: list[Any] = []
        """The optimizers that have stepped; held, so that their `id`s are unique."""

    def start(self) -> None:
        return_large_blocks()
        PostImportHook("torch", self._attach).start()

    def _attach(self, torch: ModuleType) -> None:
        self.has_torch = True
        module = import_module("torch.optim.optimizer")
        module.register_optimizer_step_pre_hook(self._guarded(self._before_step))
        module.register_optimizer_step_post_hook(self._guarded(self._after_step))

    def _guarded(self, measure: Callable[[Any], None]) -> Callable[..., None]:
        """Wrap a hook: its first failure becomes `refused`, and ends the script."""

        def hook(optimizer: Any, *_: Any) -> None:
            if os.getpid() != self._pid:  # a forked child
                return
            if self._over:  # the script caught SystemExit
                self._end()
            try:
                measure(optimizer)
            except _CannotBeMeasured as error:
                self.refused = str(error)
            except Exception as error:  # must not reach the script
                self.refused = f"The steps could not be measured ({type(error).__name__}: {error})."
                log.debug("stepscope: %s", self.refused, exc_info=True)
            if self._over:
                self._end()

        return hook

    @property
    def _over(self) -> bool:
        return self.refused is not None or len(self.steps) >= self._wanted

    def _before_step(self, optimizer: Any) -> None:
        parameters = list(optimizer_parameters([optimizer]))
        index = cuda_index(parameters)
        weights = StorageBytes(index)
        weights.add(parameters)
        held = StorageBytes(index, weights)
        held.add(gradients(parameters))
        self._parameters = weights.bytes
        self._gradients = held.bytes

    def _after_step(self, optimizer: Any) -> None:
        parameters = list(optimizer_parameters([optimizer]))
        index = cuda_index(parameters)
        weights = StorageBytes(index)
        weights.add(parameters)
        state = StorageBytes(index, weights)
        state.add(optimizer_state([optimizer]))
        used = self._used_memory(index)
        self.steps.append(
            StepMemory(
                cuda_index=index,
                used=used,
                free=free_memory(index),
                parameters=self._parameters,
                gradients=self._gradients,
                state=state.bytes,
                optimizer=self._number(optimizer),
                waiting=waiting_optimizers(self._optimizers),
            )
        )

    def _used_memory(self, index: int | None) -> UsedMemory:
        """Read the memory and reset its peaks; on a CPU without what the C library caches."""
        if index is None:
            peak = process_peak()
            trim_heap()
            now = used_memory(None).now
            used = UsedMemory(now, max(peak, now))
        else:
            used = used_memory(index)
        reset_peak(index)
        return used

    def _number(self, optimizer: Any) -> int:
        """Return the index of this optimizer in the order of first steps."""
        for number, known in enumerate(self._optimizers):
            if known is optimizer:
                return number
        self._optimizers.append(optimizer)
        return len(self._optimizers) - 1

    def _end(self) -> NoReturn:
        # In another thread SystemExit ends only that thread.
        if self._has_raised or threading.current_thread() is not threading.main_thread():
            self._ended()
            sys.stderr.flush()
            os._exit(0 if self.refused is None else 1)
        self._has_raised = True
        raise MeasurementDone(0)


def cuda_index(parameters: list[Any]) -> int | None:
    """Return the index of the CUDA device of all parameters, None for the host."""
    devices = {str(one.device) for one in parameters}
    kinds = {one.device.type for one in parameters}
    if len(devices) > 1 or not kinds <= {"cpu", "cuda"}:
        raise _CannotBeMeasured(
            f"The model lies on {', '.join(sorted(devices))}, and one device is measured at a "
            "time. Measure a part of the model alone."
        )
    return int(parameters[0].device.index) if kinds == {"cuda"} else None


def device_name(index: int | None) -> str:
    return "the CPU" if index is None else str(sys.modules["torch"].cuda.get_device_name(index))


def waiting_optimizers(stepped: list[Any]) -> int:
    """Return the number of optimizers of other parameters without a step so far."""
    known = {id(one) for one in optimizer_parameters(stepped)}
    made, _models = model_states.search()
    return sum(known.isdisjoint(map(id, optimizer_parameters([one]))) for one in made)


def return_large_blocks() -> None:
    """Make the C library return each large block when it is freed, so that peaks are comparable.

    By default it raises this limit to the size of freed blocks of up to 32 MiB and caches them: the
    peak of equal steps then differs by a third.
    """
    with contextlib.suppress(OSError, AttributeError):  # a C library other than glibc
        ctypes.CDLL(None).mallopt(_M_MMAP_THRESHOLD, _LARGE_BLOCK_BYTES)


def trim_heap() -> None:
    """Return the free memory of the C library to the system; it caches freed tensors."""
    with contextlib.suppress(OSError, AttributeError):  # a C library other than glibc
        ctypes.CDLL(None).malloc_trim(0)
