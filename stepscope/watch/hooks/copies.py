"""Measure the device time of copies to the GPU by `to` and `cuda` of tensors."""

from __future__ import annotations

import functools
import time
from collections.abc import Callable
from threading import get_ident
from types import MethodType
from typing import Any

from stepscope.store.cuda_readback import CudaEventPair, CudaEventTimerPool
from stepscope.watch.hooks.patching import Function, HookGuard, opaque, replace_bound

MAX_PAIRS = 64  # Maximum number of measured copies of a step.
MIN_INTERVAL_S = 0.01  # Minimum time between the starts of two steps whose copies are measured.


class CopyTimer:
    """Measures the device time of a step's copies to the current GPU.

    Two CUDA events bracket a copy and are read once the device has completed them, without waiting.
    A pair costs the host about 20 us, so only one step in 10 ms is measured. Only calls through a
    tensor are wrapped, because `__torch_function__` receives `torch.Tensor.to` as `func`, and
    scripts compare it. `training_thread` returns the id of the thread whose copies count.
    """

    def __init__(self, torch: Any, training_thread: Callable[[], int]) -> None:
        self._torch = torch
        self._training_thread = training_thread
        self._is_compiling = torch.compiler.is_compiling
        self._pairs = CudaEventTimerPool(lambda: torch.cuda.Event(enable_timing=True), MAX_PAIRS)
        self._under_way: list[CudaEventPair] = []
        self._has_missed = False
        self._is_copying = False
        self._is_measuring = True
        self._began_s = time.perf_counter()

    def harvest(self) -> float | None:
        """Return the seconds of a measured step's copies, once, after all have completed.

        Called at the end of each step. Returns None for other steps, and if a copy was not timed.
        """
        now_s = time.perf_counter()
        has_ended = self._is_measuring or bool(self._under_way)
        self._is_measuring = False
        copy_s = None
        if has_ended and all(end.query() for _, end in self._under_way):
            total_s = sum(map(self._pairs.seconds, self._under_way))
            copy_s = None if self._has_missed else total_s
            self._has_missed = False
            self._under_way = []
        if not self._under_way and now_s - self._began_s >= MIN_INTERVAL_S:
            self._is_measuring = True
            self._began_s = now_s
        return copy_s

    def around(self, original: Function, *, default: Any) -> Callable[[Any], Function | None]:
        """Return a function that binds a Tensor method; `default` is its default target device."""
        guard = HookGuard("perf/h2d")

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
                guard.call(self._end, pair)

        def bind(tensor: Any) -> Function | None:
            # A nested call, as of a subclass, is part of the copy.
            if not self._is_measuring or self._is_copying or self._is_compiling():
                return None
            return MethodType(copy, tensor) if get_ident() == self._training_thread() else None

        opaque(copy)
        opaque(self._begin, with_callees=True)
        return bind

    def _begin(self, tensor: Any, target: Any) -> CudaEventPair | None:
        torch = self._torch
        # Hides the reading of properties from torch-function modes and subclasses.
        with torch._C.DisableTorchFunction():
            if not tensor.is_cpu:
                return None
            if isinstance(target, torch.Tensor):
                target = target.device
            elif isinstance(target, str):
                target = torch.device(target)
            elif type(target) is int:
                target = torch.device("cuda", target)
            if not isinstance(target, torch.device) or target.type != "cuda":
                return None
            is_other = target.index not in (None, torch.cuda.current_device())
            if is_other or torch.cuda.is_current_stream_capturing():
                return None
            pair = self._pairs.begin()
            self._has_missed = self._has_missed or pair is None
            return pair

    def _end(self, pair: CudaEventPair) -> None:
        pair[1].record()
        self._under_way.append(pair)


def attach_copies(torch: Any, training_thread: Callable[[], int]) -> CopyTimer:
    """Wrap `to` and `cuda` of tensors, after the initialization of CUDA."""
    copies = CopyTimer(torch, training_thread)
    replace_bound(torch.Tensor, "to", functools.partial(copies.around, default=None))
    replace_bound(torch.Tensor, "cuda", functools.partial(copies.around, default="cuda"))
    return copies
