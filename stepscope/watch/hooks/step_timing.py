"""Measure the times, samples, epoch, copies to the GPU and DDP phases of a step."""

from __future__ import annotations

import functools
import time
from collections.abc import Callable
from threading import get_ident
from types import MethodType, ModuleType
from typing import TYPE_CHECKING, Any

from stepscope.distributed.ddp_timing import DDP_METRICS, DdpTiming
from stepscope.store.cuda_readback import CudaEventPair, CudaEventTimerPool
from stepscope.store.step_blocks import RATES, SAMPLES
from stepscope.watch.hooks.patching import Function, HookGuard, opaque, replace_bound, replace_call

if TYPE_CHECKING:
    from stepscope.watch.hooks.state import HookState


PAIRS = 64  # Maximum number of measured copies of a step.
LEAST_S = 0.01  # Minimum time between the starts of two steps whose copies are measured.


class StepTimer:
    """Measures the time between two steps."""

    def __init__(self, state: HookState) -> None:
        self._state = state
        self.on_cuda = self._has_begun = False
        self.time_copies: Callable[[], CopyTimer | None] = lambda: None
        """Starts the timing of copies to the GPU. Set by `optimizer.attach`."""
        self._last_s: float | None = None
        self._backwards = 0  # Number of `backward()` calls up to the last step.
        self._epoch: int | None = None
        self._transfers: CopyTimer | None = None

    def begin(self, device: Any) -> None:
        """Set the device of the run (None: the CPU) at the first step.

        Called again if an optimizer follows steps without one. A known GPU remains.
        """
        cuda_index = device.index if device is not None and device.type == "cuda" else None
        if self.on_cuda or (self._has_begun and cuda_index is None):
            return
        self._has_begun = True
        self._state.session.train_on(cuda_index)
        if cuda_index is not None:
            self.on_cuda = True
            self._transfers = self.time_copies()

    def forget(self) -> None:
        """Discard the last step, so that the next step has no step time."""
        self._last_s = None

    def add(self, row: dict[str, Any], now_s: float) -> None:
        """Add the values of a step that ended now."""
        state, feed = self._state, self._state.feed
        if state.evaluation is not None:
            state.close_evaluation()
        samples = feed.take(state.backwards - self._backwards, now_s)
        self._backwards = state.backwards
        if feed.epoch != self._epoch:
            self._epoch, state.recorder.epoch = feed.epoch, feed.epoch or 0
        elapsed_s = now_s - self._last_s - state.idle_s if self._last_s is not None else 0.0
        if elapsed_s > 0:
            row["perf/step_time"] = elapsed_s
            if feed.is_read:
                row["perf/data_wait"] = state.data_wait_s
            if samples:
                row[RATES[SAMPLES]] = samples / elapsed_s
        if state.recorder.counts:  # counts of the script replace the measured rates
            for key, number in state.recorder.take_counts().items():
                if elapsed_s > 0:
                    row[RATES[key]] = number / elapsed_s
        if state.phases is not None:
            state.phases.add(row, now_s)
        if self._transfers is not None:
            row["perf/h2d"] = self._transfers.harvest()
        self._last_s = now_s
        state.idle_s = state.data_wait_s = 0.0


class StepPhaseTimer:
    """Sums the phases of a step. Training thread only.

    `mark_s` is the end of the last batch, `backward()` or step. No phase has the wait for data.
    """

    __slots__ = ("_backward_s", "_ddp", "_forward_s", "_guard", "mark_s")

    def __init__(self) -> None:
        self.mark_s = 0.0
        self._forward_s: float | None = 0.0
        """None if the start of a forward pass is unknown, as in the first step without batches."""
        self._backward_s = 0.0
        self._ddp = DdpTiming()
        self._guard = HookGuard(DDP_METRICS)

    def backward(self, began_s: float, ended_s: float) -> None:
        if not self.mark_s:
            self._forward_s = None
        elif self._forward_s is not None:
            self._forward_s += began_s - self.mark_s
        self._backward_s += ended_s - began_s
        self.mark_s = ended_s

    def add(self, row: dict[str, Any], now_s: float) -> None:
        """Add the phases of the step that ended now."""
        if self._backward_s:
            row["perf/forward"] = self._forward_s
            row["perf/backward"] = self._backward_s
            row["perf/optimizer"] = now_s - self.mark_s
        self._guard.call(self._ddp.add, row, now_s)
        self.mark_s, self._forward_s, self._backward_s = now_s, 0.0, 0.0

    def make_ddp(self, original: Function, ddp: Any, /, *args: Any, **kwargs: Any) -> None:
        original(ddp, *args, **kwargs)
        self._guard.call(self._ddp.attach, ddp)


def attach(torch: ModuleType, state: HookState) -> None:
    """Measure the phases, in a distributed job only."""
    if state.session.world_size < 2:
        return
    state.phases = phases = StepPhaseTimer()
    replace_call(torch.nn.parallel.DistributedDataParallel, "__init__", phases.make_ddp)


class CopyTimer:
    """Measures the device time of a step's copies to the current GPU by `to` and `cuda` of tensors.

    Two CUDA events bracket a copy and are read once the device has completed them, without waiting.
    A pair costs the host about 20 us, so only one step in 10 ms is measured. Only calls through a
    tensor are wrapped, because `__torch_function__` receives `torch.Tensor.to` as `func`, and
    scripts compare it.
    """

    def __init__(self, torch: ModuleType, state: HookState) -> None:
        self._state = state
        self._torch = torch
        self._is_compiling = torch.compiler.is_compiling
        self._pairs = CudaEventTimerPool(lambda: torch.cuda.Event(enable_timing=True), PAIRS)
        self._under_way: list[CudaEventPair] = []
        self._missed = self._is_copying = False
        self._measuring = True
        self._begun = time.perf_counter()

    def harvest(self) -> float | None:
        """Return the seconds of a measured step's copies, once, after all have completed.

        Called at the end of each step. Returns None for other steps, and if a copy was not timed.
        """
        now, ended, self._measuring = time.perf_counter(), self._measuring, False
        copy_s = None
        if (ended or self._under_way) and all(map(self._pairs.has_ended, self._under_way)):
            pairs, self._under_way = self._under_way, []
            total_s = sum(map(self._pairs.seconds, pairs))
            copy_s, self._missed = None if self._missed else total_s, False
        if not self._under_way and now - self._begun >= LEAST_S:
            self._measuring, self._begun = True, now
        return copy_s

    def around(self, original: Function, *, default: Any) -> Callable[[Any], Function | None]:
        """Return a function that binds a Tensor method; `default` is its default target device."""
        state, is_compiling, guard = self._state, self._is_compiling, HookGuard("perf/h2d")

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
            if not self._measuring or self._is_copying or is_compiling():
                return None
            return MethodType(copy, tensor) if get_ident() == state.thread else None

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
            self._missed = self._missed or pair is None
            return pair

    def _end(self, pair: CudaEventPair) -> None:
        self._pairs.end(pair)
        self._under_way.append(pair)


def attach_copies(torch: ModuleType, state: HookState) -> CopyTimer:
    """Wrap `to` and `cuda` of tensors, after the initialization of CUDA."""
    copies = CopyTimer(torch, state)
    replace_bound(torch.Tensor, "to", functools.partial(copies.around, default=None))
    replace_bound(torch.Tensor, "cuda", functools.partial(copies.around, default="cuda"))
    return copies
