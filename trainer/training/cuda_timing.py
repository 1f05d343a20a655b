"""How long the GPU took for each step: its copies and its computing, without waiting for it.

Pairs of CUDA events are recorded around both. The row of a step goes on once its loss has come
from the GPU. All events of that step lie before the loss, so they have passed and are read then.
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

PAIRS_LIMIT = 8192
"""Pairs in use at a time: two for each batch of the steps under way, with any accumulation."""


@dataclass(slots=True)
class StepTimings:
    """The pairs of one step; None for what could not be measured."""

    copies: list[CudaEventPair | None] = field(default_factory=list)
    computing: list[CudaEventPair | None] = field(default_factory=list)
    gpu_wait_s: float = 0.0


class CudaStepTimer:
    """Collects the pairs of the step that is being queued; used by the training thread alone."""

    def __init__(self, device: torch.device) -> None:
        self._pairs = _pairs_of(device.index)
        self._spans = StepTimings()
        self._step: CudaEventPair | None = None

    def begin_copy(self) -> CudaEventPair | None:
        """Mark the begin of a copy on the current stream."""
        return self._pairs.begin()

    def end_copy(self, pair: CudaEventPair | None) -> None:
        """Mark the end of a copy, of a batch that the next step uses."""
        self._end(pair, self._spans.copies)

    def begin_step(self) -> None:
        """Mark the begin of a batch's computing."""
        self._step = self._pairs.begin()

    def end_step(self) -> None:
        """Mark the end of a batch's computing; a step may have several batches."""
        pair, self._step = self._step, None
        self._end(pair, self._spans.computing)

    def waited(self, seconds: float) -> None:
        """Add time that the host waited for the GPU, if it belongs to a training step."""
        if self._spans.computing:
            self._spans.gpu_wait_s += seconds

    def take(self) -> StepTimings:
        """Return the pairs since the last call."""
        spans, self._spans = self._spans, StepTimings()
        return spans

    def discard(self) -> None:
        """Free the pairs of a step that a failure or the end of the run has left without a row."""
        spans = self.take()
        for pair in (*spans.copies, *spans.computing, self._step):
            if pair is not None:
                self._pairs.free(pair)
        self._step = None

    def row(self, spans: StepTimings) -> MetricRow:
        """Return the times in seconds by metric key, and free the pairs.

        What could not be measured is missing. Never raises what CUDA raises.
        """
        row: MetricRow = {}
        copies, computing = self._seconds(spans.copies), self._seconds(spans.computing)
        if copies is not None:
            row["perf/h2d"] = copies  # 0 where the data set lies on the device
        if computing is not None and spans.computing:
            row["perf/gpu_time"] = computing
            row["perf/gpu_wait"] = spans.gpu_wait_s
        return row

    def _end(self, pair: CudaEventPair | None, spans: list[CudaEventPair | None]) -> None:
        if pair is not None:
            self._pairs.end(pair)
        spans.append(pair)

    def _seconds(self, spans: list[CudaEventPair | None]) -> float | None:
        """Return the sum; None where a pair is missing or the device has not passed it."""
        seconds = [None if pair is None else self._elapsed(pair) for pair in spans]
        return None if None in seconds else sum(filter(None, seconds))

    def _elapsed(self, pair: CudaEventPair) -> float | None:
        try:
            return self._pairs.seconds(pair)  # torch itself asks first whether they have passed
        except (RuntimeError, ValueError):  # not yet, or the device failed, which others tell
            self._pairs.free(pair)
            return None


class TimedScalars(CudaScalarReadback):
    """The rows of the steps, each with the times of its own step."""

    def __init__(self, sink: RowSink, times: CudaStepTimer) -> None:
        super().__init__(self._finish)
        self._timed_sink = sink
        self._times = times
        self._spans: deque[StepTimings] = deque()

    def put(self, step: int, ts: float, row: MetricRow, scalars: Mapping[str, Tensor]) -> None:
        """Queue the copy of the scalars, and keep the pairs recorded since the last row."""
        self._spans.append(self._times.take())
        super().put(step, ts, row, scalars)

    def discard(self) -> None:
        """Drop the rows under way, and free all memory and pairs of this run: others need them.

        Waits for the copies.
        """
        self._timed_sink = lambda step, ts, row: None
        self.flush()
        self._pages.clear()
        self._times.discard()

    def _finish(self, step: int, ts: float, row: MetricRow) -> None:
        # Rows leave in the order in which they came, so the oldest pairs are this row's.
        row.update(self._times.row(self._spans.popleft()))
        self._timed_sink(step, ts, row)


@cache
def _pairs_of(index: int) -> CudaEventTimerPool:
    """Return the pairs of a device. Runs of this process share them: events are never freed."""
    return CudaEventTimerPool(partial(torch.cuda.Event, enable_timing=True), PAIRS_LIMIT)
