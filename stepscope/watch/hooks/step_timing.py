"""Measure the times, samples, epoch and DDP phases of a step."""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType
from typing import TYPE_CHECKING, Any

from stepscope.distributed.ddp_timing import DDP_METRICS, DdpTiming
from stepscope.recorder.rows import RATES, SAMPLES
from stepscope.watch.hooks.patching import Function, HookGuard, replace

if TYPE_CHECKING:
    from stepscope.watch.hooks.h2d_copies import CopyTimer
    from stepscope.watch.hooks.state import HookState


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

    `mark_s` is the end of the last batch, `backward()` or step. The time from a step to the next
    batch is in no phase.
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

    def around_making(self, original: Function) -> Function:
        # Positional only, because Lightning passes the model as `module=`.
        def __init__(ddp: Any, /, *args: Any, **kwargs: Any) -> None:
            original(ddp, *args, **kwargs)
            self._guard.call(self._ddp.meet, ddp)

        return __init__


def attach(torch: ModuleType, state: HookState) -> None:
    """Measure the phases, in a distributed job only."""
    if state.session.world_size < 2:
        return
    state.phases = phases = StepPhaseTimer()
    owner = torch.nn.parallel.DistributedDataParallel
    replace(owner, "__init__", phases.around_making, traced=False)
