"""Read a step's CUDA scalars (loss, gradient norm, …) asynchronously, without a device sync.

`CudaScalarReadback` copies scalars on their device at each step, and all of them into pinned memory
every PERIOD_S; rows are recorded, in order, at a later step. Stream order protects a copied value
from later in-place work, collectives and graph replays. Torch is found in `sys.modules`.
"""

from __future__ import annotations

import ctypes
import logging
import sys
import time
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from stepscope.common.json_values import first_line

log = logging.getLogger(__name__)

POLL_S = 0.005
CELLS = 256  # maximum number of scalars in one copy to the host, and of one row
PERIOD_S = 0.01  # minimum time between two copies to the host that are not full

MetricRow = dict[str, float | None]
RowSink = Callable[[int, float, MetricRow], None]
"""Called with (step, epoch seconds of the step boundary, values), in order of the steps."""


@dataclass(frozen=True, slots=True, eq=False)
class _Page:
    """Memory of CELLS elements on a device, for the scalars of one stream."""

    stream: Any
    memory: Any
    cells: Any  # a view of each element


@dataclass(slots=True, eq=False)
class _Batch:
    """Scalars of some rows that are copied to the host together."""

    page: _Page
    cells: int = 0
    values: Any = None  # array of the values on the host; None before the copy is queued
    event: Any = None  # the CUDA event after the copy

    def has_arrived(self) -> bool:
        """Return True if the copy has ended or failed."""
        return self.values is not None and (self.event is None or self.event.query())


@dataclass(frozen=True, slots=True)
class _Waiting:
    step: int
    ts: float
    row: MetricRow
    keys: tuple[str, ...]
    batch: _Batch | None  # None: the scalars could not be copied
    first: int


class CudaScalarReadback:
    """Rows of one recorder whose scalars are being copied.

    Only `put`, `poll` and `flush` call CUDA. Raises no CUDA error: if the device fails, rows are
    recorded without their scalars.
    """

    def __init__(self, sink: RowSink) -> None:
        self._sink = sink
        self._waiting: deque[_Waiting] = deque()
        self._warned = False
        self._pages: dict[tuple[int, int], _Page] = {}  # by device and stream
        self._open: dict[tuple[int, int], _Batch] = {}  # the next copy to the host of each page
        self._due = 0.0
        self.dropped = 0  # rows recorded without some of their scalars

    def __len__(self) -> int:
        return len(self._waiting)

    def put(self, step: int, ts: float, row: MetricRow, scalars: Mapping[str, Any]) -> None:
        """Queue the copy of the scalars (CUDA tensors of one element). Never blocks."""
        keys = tuple(scalars)[:CELLS]
        batch = self._gather([scalars[key] for key in keys]) if keys else None
        if scalars and (batch is None or len(keys) < len(scalars)):
            self.dropped += 1
        first = 0 if batch is None else batch.cells - len(keys)
        self._waiting.append(_Waiting(step, ts, row, keys, batch, first))

    def poll(self) -> None:
        """Record the rows whose scalars have been copied. Raises errors of the sink."""
        for _ in range(self._count_arrived()):
            self._record_row(self._waiting.popleft())

    def flush(self, timeout_s: float | None = None) -> None:
        """Wait for all copies and record every row; after `timeout_s` without scalars."""
        try:
            if not _is_capturing():
                self._send()
                for row in self._waiting if timeout_s is None else ():
                    if row.batch is not None and row.batch.event is not None:
                        row.batch.event.synchronize()
            elif timeout_s is None:
                return
        except Exception as error:  # noqa: BLE001 - torch's own, whichever it raises
            self._give_up(error)
        until = time.monotonic() + (timeout_s or 0.0)
        self.poll()
        while self._waiting and time.monotonic() < until:
            time.sleep(POLL_S)
            self.poll()
        if self._waiting:
            self._give_up(TimeoutError("the GPU does not answer"))

    def _count_arrived(self) -> int:
        """Return the number of rows whose scalars have been copied; 0 if the device fails."""
        count = 0
        try:
            if self._waiting and not _is_capturing():  # a query would end the capture
                if time.monotonic() >= self._due:
                    self._send()
                arrived = None
                for row in self._waiting:
                    if row.batch is not arrived and row.batch is not None:
                        if not row.batch.has_arrived():
                            break
                        arrived = row.batch
                    count += 1
        except Exception as error:  # noqa: BLE001 - torch's own, whichever it raises
            self._give_up(error)
            return 0
        return count

    def _gather(self, scalars: list[Any]) -> _Batch | None:
        """Copy scalars on their device for the next copy to the host; return None on failure."""
        try:
            if _is_capturing():
                return None
            key = _stream_key(scalars[0].device)
            if key in self._open and self._open[key].cells + len(scalars) > CELLS:
                self._send()
            if key not in self._pages:
                self._pages[key] = _new_page(scalars[0].device)
            batch = self._open.setdefault(key, _Batch(self._pages[key]))
            cells = batch.page.cells[batch.cells : batch.cells + len(scalars)]
            # A parameter becomes a plain tensor.
            plain = [scalar.detach().reshape(()) for scalar in scalars]
            sys.modules["torch"]._foreach_copy_(cells, plain)
            batch.cells += len(scalars)
            if time.monotonic() >= self._due:
                self._send()
        except Exception as error:  # noqa: BLE001 - torch's own, whichever it raises
            self._warn_once(error)
            return None
        return batch

    def _send(self) -> None:
        """Queue one copy to the host of each stream's scalars, on that stream."""
        while self._open:
            _, batch = self._open.popitem()
            batch.values = ()  # if the copy fails
            if batch.cells:
                batch.values, batch.event = _copy_to_host(batch.page, batch.cells)
                self._due = time.monotonic() + PERIOD_S

    def _record_row(self, row: _Waiting) -> None:
        if row.batch is not None:
            values = row.batch.values[row.first : row.first + len(row.keys)]
            # A copy that failed has no values, one that a signal handler began has too few.
            self.dropped += len(values) < len(row.keys)
            row.row.update(zip(row.keys, map(float, values), strict=False))
        self._sink(row.step, row.ts, row.row)

    def _give_up(self, error: Exception) -> None:
        """Record every row without scalars; their memory is never freed, copies may arrive."""
        self._warn_once(error)
        keep_for_good([*self._waiting])
        while self._waiting:
            row = self._waiting.popleft()
            self.dropped += row.batch is not None
            self._sink(row.step, row.ts, row.row)

    def _warn_once(self, error: Exception) -> None:
        if not self._warned:
            log.warning("stepscope: values on the GPU could not be read: %s", first_line(error))
        self._warned = True


def is_gpu_scalar(value: Any) -> bool:
    """Return True for a tensor of one element on a GPU."""
    return getattr(value, "is_cuda", False) and value.numel() == 1


def keep_for_good(kept: object) -> None:
    """Never free an object: torch's deleters abort after a fork or a sticky CUDA error."""
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(kept))


def _stream_key(device: Any) -> tuple[int, int]:
    return device.index, sys.modules["torch"]._C._cuda_getCurrentRawStream(device.index)


def _new_page(device: Any) -> _Page:
    """Return memory for the current stream, independent of the script's inference mode."""
    torch = sys.modules["torch"]
    with torch.inference_mode(mode=False):
        memory = torch.empty(CELLS, dtype=torch.float64, device=device)
        return _Page(torch.cuda.current_stream(device), memory, memory.unbind())


def _copy_to_host(page: _Page, count: int) -> tuple[Any, Any]:
    """Queue the copy of a page's first elements; return an array and the event after the copy."""
    torch = sys.modules["torch"]
    with torch.cuda.stream(page.stream):
        host = torch.empty(count, dtype=torch.float64, device="cpu", pin_memory=True)
        host.copy_(page.memory[:count], non_blocking=True)
        event = torch.cuda.Event()
        event.record()
    return host.numpy(), event


def _is_capturing() -> bool:
    """Return True during a CUDA graph capture, which a copy or an event would change."""
    return bool(sys.modules["torch"].cuda.is_current_stream_capturing())


CudaEventPair = tuple[Any, Any]  # two `torch.cuda.Event` with timing


class CudaEventTimerPool:
    """At most `limit` reusable event pairs of one device, created on demand, never freed."""

    def __init__(self, new_event: Callable[[], Any], limit: int) -> None:
        self._new_event = new_event
        self._free: list[CudaEventPair] = []
        self._left = limit

    def begin(self) -> CudaEventPair | None:
        """Record the first event of a pair on the current stream; None if all are in use."""
        if not self._free:
            if not self._left:
                return None
            self._left -= 1
            pair = self._new_event(), self._new_event()
            keep_for_good(pair)
        else:
            pair = self._free.pop()
        pair[0].record()
        return pair

    def end(self, pair: CudaEventPair) -> None:
        pair[1].record()

    def has_ended(self, pair: CudaEventPair) -> bool:
        return bool(pair[1].query())

    def seconds(self, pair: CudaEventPair) -> float:
        """Return the time between the events of a pair, and free the pair unless torch raises."""
        seconds: float = pair[0].elapsed_time(pair[1]) / 1e3  # milliseconds
        self._free.append(pair)
        return seconds

    def free(self, pair: CudaEventPair) -> None:
        """Free an unread pair; a CUDA event may be recorded again at any time."""
        self._free.append(pair)
