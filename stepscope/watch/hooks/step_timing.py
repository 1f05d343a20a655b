"""Measure the times, samples, epoch and DDP phases of a step."""

from __future__ import annotations

from typing import Any

from stepscope.distributed.ddp_timing import DDP_METRICS, DdpTiming
from stepscope.store.blocks import RATES, SAMPLES
from stepscope.watch.hooks.copies import CopyTimer
from stepscope.watch.hooks.epochs import BatchTracker
from stepscope.watch.hooks.patching import Function, HookGuard


class StepTimer:
    """Measures the time between two steps. Training thread only."""

    def __init__(self, recorder: Any) -> None:
        self.feed = BatchTracker(recorder)  # Batches of the DataLoaders.
        self.phases = StepPhaseTimer()
        self.copies: CopyTimer | None = None  # None without CUDA.
        self.backwards = 0  # Calls of `backward()`, of any kind.
        self.data_wait_s = 0.0
        self.idle_s = 0.0
        """Time since the last step that the step time excludes: commands, pauses, evaluation."""
        self.evaluation: tuple[float, float, int] | None = None
        """Start, end so far, and `backwards` of an evaluation not yet in `idle_s`."""
        self._recorder = recorder
        self._last_s: float | None = None
        self._last_backwards = 0
        self._epoch: int | None = None

    def forget(self) -> None:
        """Discard the last step, so that the next step has no step time."""
        self._last_s = None

    def add(self, row: dict[str, Any], now_s: float) -> None:
        """Add the values of a step that ended now."""
        self.close_evaluation()
        feed, recorder = self.feed, self._recorder
        samples = feed.take(self.backwards - self._last_backwards, now_s)
        self._last_backwards = self.backwards
        if feed.epoch != self._epoch:
            self._epoch = feed.epoch
            recorder.epoch = feed.epoch or 0
        elapsed_s = now_s - self._last_s - self.idle_s if self._last_s is not None else 0.0
        if elapsed_s > 0:
            row["perf/step_time"] = elapsed_s
            if feed.is_read:
                row["perf/data_wait"] = self.data_wait_s
            if samples:
                row[RATES[SAMPLES]] = samples / elapsed_s
        if recorder.counts:  # counts of the script replace the measured rates
            for key, number in recorder.take_counts().items():
                if elapsed_s > 0:
                    row[RATES[key]] = number / elapsed_s
        self.phases.add(row, now_s)
        if self.copies is not None:
            row["perf/h2d"] = self.copies.harvest()
        self._last_s = now_s
        self.idle_s = 0.0
        self.data_wait_s = 0.0

    def exclude(self, began_s: float, ended_s: float) -> None:
        """Exclude the time of an evaluation from the step time."""
        if self.evaluation is not None and self.evaluation[2] == self.backwards:
            began_s = min(began_s, self.evaluation[0])
        else:
            self.close_evaluation()
        self.evaluation = began_s, ended_s, self.backwards

    def close_evaluation(self) -> None:
        """Subtract the evaluation so far from the step time."""
        if self.evaluation is not None:
            began_s, ended_s, _ = self.evaluation
            self.idle_s += ended_s - began_s
            self.evaluation = None


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
        self._ddp: DdpTiming | None = None  # None without DistributedDataParallel.
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
        if self._ddp is not None:
            self._guard.call(self._ddp.add, row, now_s)
        self.mark_s = now_s
        self._forward_s = 0.0
        self._backward_s = 0.0

    def make_ddp(self, original: Function, ddp: Any, /, *args: Any, **kwargs: Any) -> None:
        original(ddp, *args, **kwargs)
        self._ddp = self._ddp or DdpTiming()
        self._guard.call(self._ddp.attach, ddp)
