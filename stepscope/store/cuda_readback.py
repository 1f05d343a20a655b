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
CELLS = 256  # number of scalars in one copy to the host, unless one row has more
PERIOD_S = 0.01  # minimum time between two copies to the host that are not full

MetricRow = dict[str, float | None]
RowSink = Callable[[int, float, MetricRow], None]
"""Called with (step, epoch seconds of the step boundary, values), in order of the steps."""


@dataclass(frozen=True, slots=True, eq=False)
class _Page:
    """Memory on a device for the scalars of one stream."""

    stream: Any
    memory: Any
    cells: Any  # a view of each element


@dataclass(slots=True, eq=False)
class _Batch:
    """Scalars of some rows that are copied to the host together."""

    page: _Page
    cells: int = 0
    values: Any = ()  # array of the values on the host
    event: Any = None  # the CUDA event after the copy, until it has ended
    is_sent: bool = False


@dataclass(frozen=True, slots=True)
class _Waiting:
    step: int
    ts: float
    row: MetricRow
    keys: tuple[str, ...]
    batch: _Batch | None  # None: no scalars, or they could not be copied
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
        self._open: _Batch | None = None  # the next copy to the host
        self._due = 0.0

    def __len__(self) -> int:
        return len(self._waiting)

    def put(self, step: int, ts: float, row: MetricRow, scalars: Mapping[str, Any]) -> None:
        """Queue the copy of the scalars (CUDA tensors of one element). Never blocks."""
        batch = self._gather(list(scalars.values())) if scalars else None
        first = 0 if batch is None else batch.cells - len(scalars)
        self._waiting.append(_Waiting(step, ts, row, tuple(scalars), batch, first))

    def poll(self) -> None:
        """Record the rows whose scalars have been copied. Raises errors of the sink."""
        while self._waiting and self._has_arrived(self._waiting[0].batch):
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

    def _has_arrived(self, batch: _Batch | None) -> bool:
        """Return True if a batch is on the host, or never will be; sends the next one if due."""
        try:
            if _is_capturing():  # a query would end the capture
                return False
            if time.monotonic() >= self._due:
                self._send()
            if batch is None:
                return True
            if batch.event is not None and batch.event.query():
                batch.event = None
        except Exception as error:  # noqa: BLE001 - torch's own, whichever it raises
            self._give_up(error)
            return False
        return batch.is_sent and batch.event is None

    def _gather(self, scalars: list[Any]) -> _Batch | None:
        """Copy scalars on their device for the next copy to the host; return None on failure."""
        try:
            if _is_capturing():
                return None
            key = _stream_key(scalars[0].device)
            page = self._pages.get(key)
            if page is None or len(page.cells) < len(scalars):
                page = _new_page(scalars[0].device, max(CELLS, len(scalars)))
                self._pages[key] = page
            batch = self._open
            has_room = batch is not None and batch.cells + len(scalars) <= len(page.cells)
            if batch is None or batch.page is not page or not has_room:
                self._send()
                batch = self._open = _Batch(page)
            cells = page.cells[batch.cells : batch.cells + len(scalars)]
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
        """Queue the copy of the open batch to the host, on its stream."""
        batch, self._open = self._open, None
        if batch is not None:
            batch.is_sent = True  # also if the copy fails
            self._due = time.monotonic() + PERIOD_S
            batch.values, batch.event = _copy_to_host(batch.page, batch.cells)

    def _record_row(self, row: _Waiting) -> None:
        if row.batch is not None:
            # A copy that failed has no values, one that a signal handler began has too few.
            values = row.batch.values[row.first : row.first + len(row.keys)]
            row.row.update(zip(row.keys, map(float, values), strict=False))
        self._sink(row.step, row.ts, row.row)

    def _give_up(self, error: Exception) -> None:
        """Record every row without scalars; their memory is never freed, copies may arrive."""
        self._warn_once(error)
        keep_for_good([*self._waiting])
        while self._waiting:
            row = self._waiting.popleft()
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


def _new_page(device: Any, cells: int) -> _Page:
    """Return memory for the current stream, independent of the script's inference mode."""
    torch = sys.modules["torch"]
    with torch.inference_mode(mode=False):
        memory = torch.empty(cells, dtype=torch.float64, device=device)
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

    def seconds(self, pair: CudaEventPair) -> float:
        """Return the time between the events of a pair, and free the pair unless torch raises."""
        seconds: float = pair[0].elapsed_time(pair[1]) / 1e3  # milliseconds
        self._free.append(pair)
        return seconds

    def free(self, pair: CudaEventPair) -> None:
        """Free an unread pair; a CUDA event may be recorded again at any time."""
        self._free.append(pair)
