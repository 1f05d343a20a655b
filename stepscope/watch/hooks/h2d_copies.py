"""Measure the device time of copies to the GPU by `.to()` and `.cuda()` of a CPU tensor.

Two CUDA events bracket a copy and are read once the device has completed them, without waiting. A
pair costs the host about 20 us, so only one step in 10 ms is measured. The wrappers are installed
at the first optimizer step on a CUDA device. Only calls through a tensor are wrapped, because
`__torch_function__` receives `torch.Tensor.to` as `func`, and scripts compare it.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable
from threading import get_ident
from types import MethodType, ModuleType
from typing import Any

from stepscope.recorder.cuda_readback import CudaEventPair, CudaEventTimerPool
from stepscope.watch.hooks.patching import Function, HookGuard, opaque, replace_bound
from stepscope.watch.hooks.state import HookState

PAIRS = 64  # Maximum number of measured copies of a step.
LEAST_S = 0.01  # Minimum time between the starts of two measured steps.


class CopyTimer:
    """Times the copies of one step; `measuring` is True during a measured step."""

    def __init__(self, new_event: Callable[[], Any]) -> None:
        self._pairs = CudaEventTimerPool(new_event, PAIRS)
        self._under_way: list[CudaEventPair] = []
        self._missed = False
        self.measuring = True
        self._begun = time.perf_counter()

    def begin(self) -> CudaEventPair | None:
        """Record the first event of a pair; return None if all pairs are in use."""
        pair = self._pairs.begin()
        self._missed = self._missed or pair is None
        return pair

    def end(self, pair: CudaEventPair) -> None:
        self._pairs.end(pair)
        self._under_way.append(pair)

    def harvest(self) -> float | None:
        """Return the seconds of a measured step's copies, once, after all have completed.

        Called at the end of each step. Returns None for other steps, and if a copy was not timed.
        """
        now, ended, self.measuring = time.perf_counter(), self.measuring, False
        copy_s = None
        if (ended or self._under_way) and all(map(self._pairs.has_ended, self._under_way)):
            pairs, self._under_way = self._under_way, []
            total_s = sum(map(self._pairs.seconds, pairs))
            copy_s, self._missed = None if self._missed else total_s, False
        if not self._under_way and now - self._begun >= LEAST_S:
            self.measuring, self._begun = True, now
        return copy_s


class H2DCopyHook:
    """Measures every copy from the CPU to the current CUDA device."""

    def __init__(self, torch: ModuleType, state: HookState, transfers: CopyTimer) -> None:
        self._state = state
        self._transfers = transfers
        self._is_compiling = torch.compiler.is_compiling
        self._is_capturing = torch.cuda.is_current_stream_capturing
        self._current = torch.cuda.current_device
        self._device: type[Any] = torch.device
        self._tensor: type[Any] = torch.Tensor
        self._plainly = torch._C.DisableTorchFunction
        """Hides the reading of properties from torch-function modes and subclasses."""
        self._is_copying = False

    def around(self, original: Function, *, default: Any) -> Callable[[Any], Function | None]:
        """Return a function that binds a Tensor method; `default` is its default target device."""
        state, is_compiling, guard = self._state, self._is_compiling, HookGuard("perf/h2d")
        transfers = self._transfers

        @functools.wraps(original)
        def copy(tensor: Any, *args: Any, **kwargs: Any) -> Any:
            target = kwargs.get("device", args[0] if args else default)
            pair = guard.call(self._begin, tensor, target)
            if pair is None:
                return original(tensor, *args, **kwargs)
            self._is_copying = True
            try:
                return original(tensor, *args, **kwargs)
            finally:
                self._is_copying = False
                guard.call(transfers.end, pair)

        def bind(tensor: Any) -> Function | None:
            # A nested call, as of a subclass, is part of the copy.
            if not transfers.measuring or self._is_copying or is_compiling():
                return None
            return MethodType(copy, tensor) if get_ident() == state.thread else None

        opaque(copy)
        opaque(self._begin, with_callees=True)
        return bind

    def _begin(self, tensor: Any, target: Any) -> CudaEventPair | None:
        with self._plainly():
            if not tensor.is_cpu:
                return None
            if isinstance(target, self._tensor):
                target = target.device
            elif isinstance(target, str):
                target = self._device(target)
            elif type(target) is int:
                target = self._device("cuda", target)
            if not isinstance(target, self._device) or target.type != "cuda":
                return None
            if target.index not in (None, self._current()) or self._is_capturing():
                return None
            return self._transfers.begin()


def attach(torch: ModuleType, state: HookState) -> CopyTimer:
    """Wrap `to` and `cuda` of tensors, after the initialization of CUDA."""
    transfers = CopyTimer(lambda: torch.cuda.Event(enable_timing=True))
    around, owner = H2DCopyHook(torch, state, transfers).around, torch.Tensor
    replace_bound(owner, "to", functools.partial(around, default=None))
    replace_bound(owner, "cuda", functools.partial(around, default="cuda"))
    return transfers
