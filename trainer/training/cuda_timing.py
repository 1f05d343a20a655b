"""GPU times of each step for copies and compute, without a synchronization.

Pairs of CUDA events enclose both. They are read when the loss of the step has arrived on the host:
all events of the step precede the loss.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache, partial

import torch
from torch import Tensor

from stepscope.recorder.cuda_readback import (
    CudaEventPair,
    CudaEventTimerPool,
    CudaScalarReadback,
    MetricRow,
    RowSink,
)

PAIRS_LIMIT = 8192  # two per micro-batch of the queued steps, with any accumulation


@dataclass(slots=True)
class StepTimings:
    """The event pairs of a step; None for a pair that could not be recorded."""

    copies: list[CudaEventPair | None] = field(default_factory=list)
    computing: list[CudaEventPair | None] = field(default_factory=list)
    gpu_wait_s: float = 0.0


class CudaStepTimer:
    """Collects the event pairs of the current step; used by the training thread only."""

    def __init__(self, device: torch.device) -> None:
        self._pairs = _pairs_of(device.index)
        self._spans = StepTimings()
        self._step: CudaEventPair | None = None

    def begin_copy(self) -> CudaEventPair | None:
        """Record the start of a copy on the current stream."""
        return self._pairs.begin()

    def end_copy(self, pair: CudaEventPair | None) -> None:
        """Record the end of a copy for the next step."""
        self._end(pair, self._spans.copies)

    def begin_step(self) -> None:
        """Record the start of a micro-batch's compute."""
        self._step = self._pairs.begin()

    def end_step(self) -> None:
        """Record the end of a micro-batch's compute."""
        pair, self._step = self._step, None
        self._end(pair, self._spans.computing)

    def waited(self, seconds: float) -> None:
        """Add host time spent waiting for the GPU during a training step."""
        if self._spans.computing:
            self._spans.gpu_wait_s += seconds

    def take(self) -> StepTimings:
        """Return the pairs since the last call."""
        spans, self._spans = self._spans, StepTimings()
        return spans

    def discard(self) -> None:
        """Free the pairs of a step that a failure has left without a row."""
        spans = self.take()
        for pair in (*spans.copies, *spans.computing, self._step):
            if pair is not None:
                self._pairs.free(pair)
        self._step = None

    def row(self, spans: StepTimings) -> MetricRow:
        """Return measured seconds by metric key and free the pairs; never raises CUDA errors."""
        row: MetricRow = {}
        copies, computing = self._seconds(spans.copies), self._seconds(spans.computing)
        if copies is not None:
            row["perf/h2d"] = copies  # 0 if the dataset is on the device
        if computing is not None and spans.computing:
            row["perf/gpu_time"] = computing
            row["perf/gpu_wait"] = spans.gpu_wait_s
        return row

    def _end(self, pair: CudaEventPair | None, spans: list[CudaEventPair | None]) -> None:
        if pair is not None:
            self._pairs.end(pair)
        spans.append(pair)

    def _seconds(self, spans: list[CudaEventPair | None]) -> float | None:
        """Return the sum; None if a pair is missing or incomplete."""
        seconds = [None if pair is None else self._elapsed(pair) for pair in spans]
        return None if None in seconds else sum(filter(None, seconds))

    def _elapsed(self, pair: CudaEventPair) -> float | None:
        try:
            return self._pairs.seconds(pair)
        except (RuntimeError, ValueError):  # incomplete, or the device has failed
            self._pairs.free(pair)
            return None


class TimedScalars(CudaScalarReadback):
    """Logs the rows of the steps, each with its GPU times."""

    def __init__(self, sink: RowSink, times: CudaStepTimer) -> None:
        super().__init__(self._finish)
        self._timed_sink = sink
        self._times = times
        self._spans: deque[StepTimings] = deque()

    def put(self, step: int, ts: float, row: MetricRow, scalars: Mapping[str, Tensor]) -> None:
        """Queue the copy of the scalars, and store the pairs since the last row."""
        self._spans.append(self._times.take())
        super().put(step, ts, row, scalars)

    def discard(self) -> None:
        """Wait for the copies, drop their rows, and free all buffers and pairs of the run."""
        self._timed_sink = lambda step, ts, row: None
        self.flush()
        self._pages.clear()
        self._times.discard()

    def _finish(self, step: int, ts: float, row: MetricRow) -> None:
        # Rows arrive in order, so the oldest pairs belong to this row.
        row.update(self._times.row(self._spans.popleft()))
        self._timed_sink(step, ts, row)


@cache
def _pairs_of(index: int) -> CudaEventTimerPool:
    """Return the pairs of a device, shared by all runs of the process: events are never freed."""
    return CudaEventTimerPool(partial(torch.cuda.Event, enable_timing=True), PAIRS_LIMIT)
