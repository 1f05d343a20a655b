"""Measure the memory of a script's first optimizer steps, then end the script.

Hooks before and after each `step` of torch's optimizers read the counters of torch's allocator, or
on a CPU the process's memory. They sum the unique storages of parameters, gradients and optimizer
states. The script ends like by `sys.exit(0)` after the last requested step, or if one cannot be
measured.
"""

from __future__ import annotations

import contextlib
import ctypes
import logging
import os
import sys
import threading
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any, NoReturn

import psutil

from stepscope.host.usage import container
from stepscope.memory import model_states
from stepscope.memory.batch_headroom import StepMemory, TrainingDevice
from stepscope.memory.model_states import (
    StorageBytes,
    gradients,
    optimizer_parameters,
    optimizer_state,
)
from stepscope.watch.hooks.patching import PostImportHook

log = logging.getLogger(__name__)

_STATUS, _CLEAR = Path("/proc/self/status"), Path("/proc/self/clear_refs")
_M_MMAP_THRESHOLD, _LARGE_BLOCK_BYTES = -3, 128 * 1024  # <malloc.h>, and glibc's first limit
_PEAK_ONLY = "5"
"""Value for clear_refs that resets the peak of the resident memory (man proc_pid_clear_refs)."""


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
        self._before: dict[str, int] = {}
        self._pid = os.getpid()
        self._torch: Any = None
        self._optimizers: list[Any] = []
        """The optimizers that have stepped; held, so that their `id`s are unique."""

    def start(self) -> None:
        return_large_blocks()
        PostImportHook("torch", self._attach).start()

    def _attach(self, torch: ModuleType) -> None:
        self.has_torch, self._torch = True, torch
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
        grown = StorageBytes(index, weights)
        grown.add(gradients(parameters))
        self._before = {"parameters": weights.bytes, "gradients": grown.bytes}

    def _after_step(self, optimizer: Any) -> None:
        parameters = list(optimizer_parameters([optimizer]))
        index = cuda_index(parameters)
        weights = StorageBytes(index)
        weights.add(parameters)
        state = StorageBytes(index, weights)
        state.add(optimizer_state([optimizer]))
        kept, peak, reserved, reserved_now = self._amounts(index)
        self.steps.append(
            StepMemory(
                optimizer=self._number(optimizer),
                waiting=waiting_optimizers(self._optimizers),
                peak=peak,
                reserved=reserved,
                reserved_now=reserved_now,
                kept=kept,
                state=state.bytes,
                device=self._device(index),
                **self._before,
            )
        )

    def _number(self, optimizer: Any) -> int:
        """Return the index of this optimizer in the order of first steps."""
        for number, known in enumerate(self._optimizers):
            if known is optimizer:
                return number
        self._optimizers.append(optimizer)
        return len(self._optimizers) - 1

    def _amounts(self, index: int | None) -> tuple[int, int, int | None, int | None]:
        """Return bytes now, peak allocated and reserved since the last step, and reserved now.

        On a CPU the bytes are of the process, and those reserved are None.
        """
        if index is not None:
            stats = self._torch.cuda.memory_stats_as_nested_dict(index)
            self._torch.cuda.reset_peak_memory_stats(index)
            used, held = stats["allocated_bytes"]["all"], stats["reserved_bytes"]["all"]
            return used["current"], used["peak"], held["peak"], held["current"]
        peak = process_peak()
        trim_heap()
        now = int(psutil.Process().memory_info().rss)
        with contextlib.suppress(OSError):
            _CLEAR.write_text(_PEAK_ONLY)
        return now, max(peak, now), None, None

    def _device(self, index: int | None) -> TrainingDevice:
        if index is None:
            available = container().within(int(psutil.virtual_memory().available))
            return TrainingDevice("cpu", "the host's memory", available)
        free, _ = self._torch.cuda.mem_get_info(index)
        name = self._torch.cuda.get_device_name(index)
        return TrainingDevice("cuda", name, int(free), index)

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


def waiting_optimizers(stepped: list[Any]) -> int:
    """Return the number of optimizers of other parameters without a step so far."""
    known = {id(one) for one in optimizer_parameters(stepped)}
    made, _models = model_states.search()
    return sum(known.isdisjoint(map(id, optimizer_parameters([one]))) for one in made)


def process_peak(status: Path = _STATUS) -> int:
    """Return the peak of the process's resident bytes since the last reset."""
    with contextlib.suppress(OSError, ValueError):
        for line in status.read_text().splitlines():
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) * 1024
    return int(psutil.Process().memory_info().rss)


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
