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
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import dataclass, field
from typing import Any

from stepscope.common.json_values import first_line
from stepscope.store.ring import WIDTH

log = logging.getLogger(__name__)

POLL_S = 0.005
SLOTS = 1024  # Maximum number of pending copies: the number of launches that CUDA queues.
CELLS = 256  # maximum number of scalars in one copy to the host
PERIOD_S = 0.01  # minimum time between two copies to the host that are not full

MetricRow = dict[str, float | None]
RowSink = Callable[[int, float, MetricRow], None]
"""Called with (step, epoch seconds of the step boundary, values), in order of the steps."""


@dataclass(slots=True, eq=False, repr=False)
class _Slot:
    """Pinned memory for one copy of the scalars of some rows, and the CUDA events after it."""

    host: Any  # tensor of CELLS elements, float64
    values: Any  # the same memory as an array
    home: list[_Slot]
    events: dict[int, Any] = field(default_factory=dict)
    """By device index: an event belongs to the device that first recorded it."""
    landed: Any = None  # the event after the copy; None before the copy is queued
    cells: int = 0  # number of scalars in the copy; 0 after a copy that failed
    rows: int = 0  # number of rows that use the slot

    def record(self, device: Any) -> None:
        """Record the event after the copy on the current stream of `device`."""
        event = self.events.get(device.index)
        if event is None:
            event = self.events[device.index] = _event()
        event.record()
        self.landed = event

    def has_landed(self) -> bool:
        """Return True if the copy has ended or failed."""
        return not self.cells or (self.landed is not None and self.landed.query())


@dataclass(frozen=True, slots=True)
class _Waiting:
    step: int
    ts: float
    row: MetricRow
    keys: tuple[str, ...]
    slot: _Slot | None  # None: no slot was free, the scalars are dropped
    first: int


class CudaScalarReadback:
    """Rows of one recorder whose scalars are being copied.

    Only `put`, `poll` and `flush` call CUDA. Raises no CUDA error: if the device fails, or without
    a free slot, rows are recorded without their scalars.
    """

    def __init__(self, sink: RowSink) -> None:
        self._sink = sink
        self._waiting: deque[_Waiting] = deque()
        self._warned = False
        self._pages: dict[tuple[int, int], tuple[Any, Any, Sequence[Any]]] = {}
        """By device and stream: the stream, CELLS elements on the device, and their views."""
        self._open: dict[tuple[int, int], _Slot] = {}
        """By device and stream: the slot of the next copy to the host."""
        self._due = 0.0
        self.dropped = 0  # rows recorded without some of their scalars

    def __len__(self) -> int:
        return len(self._waiting)

    def put(self, step: int, ts: float, row: MetricRow, scalars: Mapping[str, Any]) -> None:
        """Queue the copy of the scalars (CUDA tensors of one element). Never blocks."""
        keys = tuple(scalars)[:WIDTH]
        slot, first = self._start([scalars[key] for key in keys]) if keys else _NOTHING
        if scalars and (slot is None or len(keys) < len(scalars)):
            self.dropped += 1
        self._waiting.append(_Waiting(step, ts, row, keys, slot, first))

    def poll(self) -> None:
        """Record the rows whose scalars have been copied. Raises errors of the sink."""
        for _ in range(self._landed()):
            self._record_row(self._waiting.popleft())

    def _landed(self) -> int:
        """Return the number of rows whose scalars have been copied; 0 if the device fails."""
        count = 0
        try:
            if self._waiting and not _is_capturing():  # a query would end the capture
                if time.monotonic() >= self._due:
                    self._send()
                landed = None
                for row in self._waiting:
                    if row.slot is not landed and row.slot is not None:
                        if not row.slot.has_landed():
                            break
                        landed = row.slot
                    count += 1
        except Exception as error:  # noqa: BLE001 - torch's own, whichever it raises
            self._give_up(error)
            return 0
        return count

    def flush(self, timeout_s: float | None = None) -> None:
        """Wait for all copies and record every row; after `timeout_s` without scalars."""
        try:
            if self._waiting and not _is_capturing():
                self._send()
                for slot in {row.slot for row in self._waiting} if timeout_s is None else ():
                    if slot is not None and slot.landed is not None:
                        slot.landed.synchronize()
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

    def _start(self, scalars: list[Any]) -> _Started:
        """Begin the copies; return their slot, None on failure, and its first element."""
        slot = None
        try:
            device = scalars[0].device
            with _ordinary_mode(), _current(device):  # an event belongs to the device of its copy
                if _is_capturing():
                    return _NOTHING
                plain = sys.modules["torch"].Tensor
                if device.type == "cuda" and all(
                    type(scalar) is plain and scalar.device == device for scalar in scalars
                ):
                    return self._gather(scalars, device)
                slot = _take_slot()
                if slot is None:
                    return _NOTHING
                for cell, scalar in enumerate(scalars):  # of any tensor type
                    value = scalar.detach().reshape(())
                    value = value.to(device, slot.host.dtype, non_blocking=True)
                    slot.host[cell].copy_(value, non_blocking=True)
                slot.record(device)
                slot.cells, slot.rows = len(scalars), 1
                return slot, 0
        except Exception as error:  # noqa: BLE001 - torch's own, whichever it raises
            self._warn_once(error)
        if slot is not None:
            slot.home.append(slot)
        return _NOTHING

    def _gather(self, scalars: list[Any], device: Any) -> _Started:
        """Copy scalars on their device, for the next copy of the current stream to the host."""
        torch, count = sys.modules["torch"], len(scalars)
        key = device.index, torch._C._cuda_getCurrentRawStream(device.index)
        if key not in self._pages:
            memory = torch.empty(CELLS, dtype=torch.float64, device=device)
            self._pages[key] = torch.cuda.current_stream(device), memory, memory.unbind()
        if key in self._open and self._open[key].cells + count > CELLS:
            self._send()
        slot = self._open.get(key) or _take_slot()
        if slot is None:
            return _NOTHING
        self._open[key] = slot
        first, slot.cells = slot.cells, slot.cells + count
        by_type: dict[Any, tuple[list[Any], list[Any]]] = {}
        for cell, scalar in zip(self._pages[key][2][first : first + count], scalars, strict=True):
            scalar = scalar.detach() if scalar.requires_grad else scalar
            cells, sources = by_type.setdefault(scalar.dtype, ([], []))
            cells.append(cell)
            sources.append(scalar.reshape(()) if scalar.dim() else scalar)
        for cells, sources in by_type.values():
            torch._foreach_copy_(cells, sources)
        if self._open.get(key) is not slot:  # a signal handler has flushed: these came too late
            return _NOTHING
        slot.rows += 1
        if time.monotonic() >= self._due:
            self._send()
        return slot, first

    def _send(self) -> None:
        """Queue one copy to the host of each stream's scalars, on that stream."""
        for key, slot in list(self._open.items()):
            stream, memory, _ = self._pages[key]
            try:
                with _ordinary_mode(), sys.modules["torch"].cuda.stream(stream):
                    if _is_capturing() or self._open.pop(key, None) is not slot:
                        continue
                    if not slot.rows:  # the copies on the device have failed
                        slot.home.append(slot)
                        continue
                    slot.host[: slot.cells].copy_(memory[: slot.cells], non_blocking=True)
                    slot.record(stream.device)
                    self._due = time.monotonic() + PERIOD_S
            except Exception as error:  # noqa: BLE001 - torch's own, whichever it raises
                self._open.pop(key, None)
                self._warn_once(error)
                slot.cells = 0

    def _record_row(self, waiting: _Waiting) -> None:
        slot, last = waiting.slot, waiting.first + len(waiting.keys)
        if slot is not None:
            if last <= slot.cells:
                values = slot.values[waiting.first : last].tolist()
                waiting.row.update(zip(waiting.keys, values, strict=True))
            else:
                self.dropped += 1
            slot.rows -= 1
            if not slot.rows:
                slot.home.append(slot)
        self._sink(waiting.step, waiting.ts, waiting.row)

    def _give_up(self, error: Exception) -> None:
        """Record every row without scalars; their slots stay in use, copies may still arrive."""
        global _free
        self._warn_once(error)
        _free = None
        while self._waiting:
            row = self._waiting.popleft()
            self.dropped += row.slot is not None
            self._sink(row.step, row.ts, row.row)

    def _warn_once(self, error: Exception) -> None:
        if not self._warned:
            log.warning("stepscope: values on the GPU could not be read: %s", first_line(error))
        self._warned = True


_Started = tuple[_Slot | None, int]
_NOTHING: _Started = (None, 0)

_free: list[_Slot] | None = None
"""Unused slots of this process; None before the first, and after a failure."""


def _take_slot() -> _Slot | None:
    """Return the most recently freed slot, which has an event; None if all are in use."""
    global _free
    if _free is None:
        free: list[_Slot] = []
        host = _pinned(SLOTS, CELLS)
        free.extend(_Slot(row, row.numpy(), free) for row in host.unbind())
        keep_for_good((host, [*free]))
        _free = free
    try:
        slot = _free.pop()
    except IndexError:
        return None
    slot.landed, slot.cells = None, 0
    return slot


def is_gpu_scalar(value: Any) -> bool:
    """Return True for a tensor of one element on a GPU."""
    return getattr(value, "is_cuda", False) and value.numel() == 1


def keep_for_good(kept: object) -> None:
    """Never free an object: torch's deleters abort after a fork or a sticky CUDA error."""
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(kept))


def _ordinary_mode() -> AbstractContextManager[Any]:
    """Exit the script's dispatch and inference modes, which would intercept our tensors."""
    torch = sys.modules["torch"]
    dispatched, inference = torch._C._len_torch_dispatch_stack(), torch.is_inference_mode_enabled()
    if not dispatched and not inference:
        return _AS_IT_IS
    modes = ExitStack()
    if dispatched:
        modes.enter_context(torch.utils._python_dispatch._disable_current_modes())
    if inference:
        modes.enter_context(torch.inference_mode(mode=False))
    return modes


_AS_IT_IS = nullcontext()


def _current(device: Any) -> AbstractContextManager[Any]:
    if device.type != "cuda":
        return _AS_IT_IS
    cuda = sys.modules["torch"].cuda
    if cuda.current_device() == device.index:
        return _AS_IT_IS
    guard: AbstractContextManager[Any] = cuda.device(device)
    return guard


def _pinned(slots: int, width: int) -> Any:
    """Return pinned memory, independent of the script's defaults."""
    torch = sys.modules["torch"]
    return torch.empty((slots, width), dtype=torch.float64, device="cpu", pin_memory=True)


def _event() -> Any:
    return sys.modules["torch"].cuda.Event()


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
