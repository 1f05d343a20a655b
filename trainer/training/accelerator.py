"""The differences between a CPU and a CUDA device, in two classes with one interface.

Training thread only; the only other thread with CUDA calls is DataLoader's pin-memory thread.

GPU times need no synchronization: pairs of CUDA events enclose copies and compute, and are read
when the loss of the step has arrived on the host, which all events of the step precede.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import cache, partial

import psutil
import torch
from torch import Tensor

from stepscope.memory.allocator import COUNTS, read
from stepscope.run.status import shortage
from stepscope.store.cuda_readback import (
    CudaEventPair,
    CudaEventTimerPool,
    CudaScalarReadback,
    MetricRow,
    RowSink,
)

PAIRS_LIMIT = 8192  # two per micro-batch of the queued steps, with any accumulation
RUN_AHEAD = 2
"""Steps that the host may queue ahead of the GPU: enough to keep it busy, few enough for commands
without delay and for step times that equal the GPU's."""


@dataclass(slots=True)
class StepTimings:
    """The event pairs of a step; None for a pair that could not be recorded."""

    copies: list[CudaEventPair | None] = field(default_factory=list)
    computing: list[CudaEventPair | None] = field(default_factory=list)
    gpu_wait_s: float = 0.0


class CudaStepTimer:
    """Collects the event pairs of the current step; used by the training thread only."""

    def __init__(self, device: torch.device) -> None:
        self._pool = _pool_of(device.index)
        self._timings = StepTimings()

    def copy(self) -> AbstractContextManager[None]:
        """Return a context for a copy on the current stream, for the next step."""
        return self._record(self._timings.copies)

    def compute(self) -> AbstractContextManager[None]:
        """Return a context for the computing of a micro-batch."""
        return self._record(self._timings.computing)

    def waited(self, seconds: float) -> None:
        """Add host time spent waiting for the GPU during a training step."""
        if self._timings.computing:
            self._timings.gpu_wait_s += seconds

    def take(self) -> StepTimings:
        """Return the pairs since the last call."""
        timings, self._timings = self._timings, StepTimings()
        return timings

    def discard(self) -> None:
        """Free the pairs of a step that a failure has left without a row."""
        timings = self.take()
        for pair in (*timings.copies, *timings.computing):
            if pair is not None:
                self._pool.free(pair)

    def row(self, timings: StepTimings) -> MetricRow:
        """Return measured seconds by metric key and free the pairs; never raises CUDA errors."""
        row: MetricRow = {}
        copies, computing = self._seconds(timings.copies), self._seconds(timings.computing)
        if copies is not None:
            row["perf/h2d"] = copies  # 0 if the dataset is on the device
        if computing is not None and timings.computing:
            row["perf/gpu_time"] = computing
            row["perf/gpu_wait"] = timings.gpu_wait_s
        return row

    @contextmanager
    def _record(self, pairs: list[CudaEventPair | None]) -> Iterator[None]:
        pair = self._pool.begin()
        pairs.append(pair)
        yield
        if pair is not None:
            pair[1].record()

    def _seconds(self, pairs: list[CudaEventPair | None]) -> float | None:
        """Return the sum; None if a pair is missing or incomplete."""
        seconds = [None if pair is None else self._elapsed(pair) for pair in pairs]
        return None if None in seconds else sum(filter(None, seconds))

    def _elapsed(self, pair: CudaEventPair) -> float | None:
        try:
            return self._pool.seconds(pair)
        except (RuntimeError, ValueError):  # incomplete, or the device has failed
            self._pool.free(pair)
            return None


class TimedScalars(CudaScalarReadback):
    """Logs the rows of the steps, each with its GPU times."""

    def __init__(self, sink: RowSink, times: CudaStepTimer) -> None:
        super().__init__(self._finish)
        self._timed_sink = sink
        self._times = times
        self._timings: deque[StepTimings] = deque()

    def put(self, step: int, ts: float, row: MetricRow, scalars: Mapping[str, Tensor]) -> None:
        """Queue the copy of the scalars, and store the pairs since the last row."""
        self._timings.append(self._times.take())
        super().put(step, ts, row, scalars)

    def discard(self) -> None:
        """Wait for the copies, drop their rows, and free all buffers and pairs of the run."""
        self._timed_sink = _no_sink
        self.flush()
        self._pages.clear()
        self._times.discard()

    def _finish(self, step: int, ts: float, row: MetricRow) -> None:
        # Rows arrive in order, so the oldest pairs belong to this row.
        row.update(self._times.row(self._timings.popleft()))
        self._timed_sink(step, ts, row)


@cache
def _pool_of(index: int) -> CudaEventTimerPool:
    """Return the pairs of a device, shared by all runs of the process: events are never freed."""
    return CudaEventTimerPool(partial(torch.cuda.Event, enable_timing=True), PAIRS_LIMIT)


def _no_sink(step: int, ts: float, row: MetricRow) -> None: ...


class HostReader:
    """Logs rows with their scalars at once, for a CPU. See `TimedScalars`."""

    def __init__(self, sink: RowSink) -> None:
        self._sink = sink

    def put(self, step: int, ts: float, row: MetricRow, scalars: Mapping[str, Tensor]) -> None:
        """Log the row with the scalars (0-d tensors)."""
        for key, scalar in scalars.items():
            row[key] = scalar.item()
        self._sink(step, ts, row)

    def poll(self) -> None: ...

    def flush(self) -> None: ...

    def discard(self) -> None:
        """Release the sink, which holds the model."""
        self._sink = _no_sink


Reader = HostReader | TimedScalars


class CpuAccelerator:
    """A CPU, which has no cache, queue or peak statistics: most methods do nothing."""

    on_gpu = False
    device = torch.device("cpu")
    times = None
    computing = nullcontext  # opens a context that times the computing of a micro-batch

    def memory(self) -> dict[str, int]:
        """Return the process memory in bytes by metric key."""
        return {"process/rss": psutil.Process().memory_info().rss}

    def release(self) -> None: ...

    def reset_peaks(self) -> None: ...

    def synchronize(self) -> None: ...

    def pace(self) -> None: ...

    def reader(self, sink: RowSink) -> HostReader:
        return HostReader(sink)


class CudaAccelerator:
    """A CUDA device, set as the current device of this thread."""

    on_gpu = True

    def __init__(self, index: int) -> None:
        self.device = torch.device("cuda", index)
        torch.cuda.set_device(self.device)
        self._steps: deque[torch.cuda.Event] = deque()
        self.times = CudaStepTimer(self.device)
        self.computing = self.times.compute

    def memory(self) -> dict[str, int]:
        """Return bytes of the caching allocator by metric key, in 5 µs without a CUDA call."""
        counters = read(self.device.index)
        return {key: int(value) for key, value in counters.items() if key not in COUNTS}

    def release(self) -> None:
        """Free step events, cuBLAS workspaces, and the caches of device and pinned memory."""
        self._steps.clear()
        torch._C._cuda_clearCublasWorkspaces()
        torch.cuda.empty_cache()
        torch._C._host_emptyCache()

    def reset_peaks(self) -> None:
        torch.cuda.reset_peak_memory_stats(self.device)

    def synchronize(self) -> None:
        torch.cuda.synchronize(self.device)

    def pace(self) -> None:
        """Record a step boundary and wait for the one RUN_AHEAD steps earlier."""
        event = self._steps.popleft() if len(self._steps) > RUN_AHEAD else None
        if event is None:
            event = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]
        event.record()
        self._steps.append(event)
        if len(self._steps) > RUN_AHEAD:
            began = time.perf_counter()
            self._steps[0].synchronize()  # costs no throughput: the GPU has RUN_AHEAD queued steps
            self.times.waited(time.perf_counter() - began)

    def reader(self, sink: RowSink) -> TimedScalars:
        return TimedScalars(sink, self.times)


Accelerator = CpuAccelerator | CudaAccelerator


def lost_device_reason(index: int | None) -> str | None:
    """Return the error of a CUDA device that this process has lost, or None. Synchronizes."""
    if index is None:
        return None
    try:
        torch.cuda.synchronize(index)
    except RuntimeError as error:
        # Without memory for a context there is nothing to lose.
        return None if shortage(error) else str(error).strip().split("\n")[0].rstrip(".")
    return None
