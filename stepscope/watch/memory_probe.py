"""Measures the memory of a script's first optimizer steps, and ends the script then.

A hook before and one after each `step` of torch's optimizers read the counters of torch's
allocator, on a CPU the process's memory, and add up what the optimizers know by unique storages.
The script ends as by `sys.exit(0)` at the boundary after the last wanted step, or as soon as it is
known that its steps cannot be measured.
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

RAISED_LIMIT = 3
"""Steps at which the script is asked to end; one that catches even that is ended from outside."""
_STATUS, _CLEAR = Path("/proc/self/status"), Path("/proc/self/clear_refs")
_PEAK_ONLY = "5"
"""Written to clear_refs it sets the peak of the resident memory back (man proc_pid_clear_refs)."""


class MeasurementDone(SystemExit):
    """Raised into the script once its first steps are measured, or cannot be."""


class _CannotBeMeasured(Exception):
    """The script's steps are not of a kind that is judged; the message is a sentence."""


class StepMemoryProbe:
    """What was measured so far; `start` waits for the script to import torch.

    `refused` says why nothing can be measured, if that is so. `ended` is called before a script
    is ended that does not let itself be.
    """

    def __init__(self, wanted: int, ended: Callable[[], None]) -> None:
        self.steps: list[StepMemory] = []
        self.refused: str | None = None
        self.has_torch = False
        self._wanted = wanted
        self._ended = ended
        self._raised = 0
        self._before: dict[str, int] = {}
        self._pid = os.getpid()
        self._torch: Any = None
        self._optimizers: list[Any] = []
        """Those that were stepped; held, so that none takes another's place."""

    def start(self) -> None:
        """Begin with the next import of torch."""
        PostImportHook("torch", self._attach).start()

    def _attach(self, torch: ModuleType) -> None:
        self.has_torch, self._torch = True, torch
        module = import_module("torch.optim.optimizer")
        module.register_optimizer_step_pre_hook(self._guarded(self._before_step))
        module.register_optimizer_step_post_hook(self._guarded(self._after_step))

    def _guarded(self, measure: Callable[[Any], None]) -> Callable[..., None]:
        """Let no failure of ours reach the script: the first one is the reason, and its end."""

        def hook(optimizer: Any, *_: Any) -> None:
            if os.getpid() != self._pid:  # a forked child
                return
            if self._over:  # the script caught what should have ended it
                self._end()
            try:
                measure(optimizer)
            except _CannotBeMeasured as error:
                self.refused = str(error)
            except Exception as error:  # the script must not see ours
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
        """Return the place of this very optimizer among those that were stepped."""
        for number, known in enumerate(self._optimizers):
            if known is optimizer:
                return number
        self._optimizers.append(optimizer)
        return len(self._optimizers) - 1

    def _amounts(self, index: int | None) -> tuple[int, int, int | None, int | None]:
        """Return what is there now, the peaks since the step before, and what is reserved now.

        On a CPU they are of the process, and nothing is reserved.
        """
        if index is not None:
            stats = self._torch.cuda.memory_stats_as_nested_dict(index)
            peak = int(stats["allocated_bytes"]["all"]["peak"])
            reserved = int(stats["reserved_bytes"]["all"]["peak"])
            self._torch.cuda.reset_peak_memory_stats(index)
            now = int(stats["allocated_bytes"]["all"]["current"])
            return now, peak, reserved, int(stats["reserved_bytes"]["all"]["current"])
        peak = process_peak()
        give_back()
        now = int(psutil.Process().memory_info().rss)
        with contextlib.suppress(OSError):
            _CLEAR.write_text(_PEAK_ONLY)
        return now, max(peak, now), None, None

    def _device(self, index: int | None) -> TrainingDevice:
        if index is None:
            return TrainingDevice("cpu", "the host's memory", container().within(host_free()))
        free, _ = self._torch.cuda.mem_get_info(index)
        name = self._torch.cuda.get_device_name(index)
        return TrainingDevice("cuda", name, int(free), index)

    def _end(self) -> NoReturn:
        if threading.current_thread() is not threading.main_thread() or self._raised:
            # In a thread of its own SystemExit ends that thread alone.
            self._raised += 1
            if self._raised > RAISED_LIMIT:
                self._ended()
                sys.stderr.flush()
                os._exit(0 if self.refused is None else 1)
        self._raised = max(1, self._raised)
        raise MeasurementDone(0)


def cuda_index(parameters: list[Any]) -> int | None:
    """Return the CUDA device that all of these lie on, None for the host."""
    devices = {str(one.device) for one in parameters}
    kinds = {one.device.type for one in parameters}
    if len(devices) > 1 or not kinds <= {"cpu", "cuda"}:
        raise _CannotBeMeasured(
            f"The model lies on {', '.join(sorted(devices))}, and one device is judged at a "
            "time. Fit a part of it alone."
        )
    return int(parameters[0].device.index) if kinds == {"cuda"} else None


def waiting_optimizers(stepped: list[Any]) -> int:
    """Return how many optimizers of other parameters there are that were not stepped yet."""
    known = {id(one) for one in optimizer_parameters(stepped)}
    made, _models = model_states.search()
    return sum(known.isdisjoint(map(id, optimizer_parameters([one]))) for one in made)


def host_free() -> int:
    """Return the bytes that the host can give without swapping."""
    return int(psutil.virtual_memory().available)


def process_peak(status: Path = _STATUS) -> int:
    """Return the peak of the process's resident memory since it was last set back."""
    with contextlib.suppress(OSError, ValueError):
        for line in status.read_text().splitlines():
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) * 1024
    return int(psutil.Process().memory_info().rss)


def give_back() -> None:
    """Have the C library return what is free to the system: it keeps freed tensors for itself."""
    with contextlib.suppress(OSError, AttributeError):  # a C library other than GNU's
        ctypes.CDLL(None).malloc_trim(0)
