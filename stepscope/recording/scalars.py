"""Brings a step's scalars (loss, gradient norm, …) to the host without stopping the device.

`.item()` on a CUDA tensor waits until the device has caught up. `DeviceScalars` queues a copy into
page-locked memory instead and hands the row on some steps later, when the copy has landed. Rows
come out in order and whole; when all slots are in flight a row goes on without its scalars.

Torch is found in `sys.modules`: whoever has a tensor has imported it.
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

from stepscope.recording.ring import WIDTH
from stepscope.recording.to_json import first_line

log = logging.getLogger(__name__)

POLL_S = 0.005
SLOTS = 1024
"""Rows under way at a time: as many launches as CUDA lets a loop run ahead of the device."""

Row = dict[str, float | None]
RowSink = Callable[[int, float, Row], None]
"""Takes (step, epoch seconds of the step boundary, values); called in order of the steps."""


@dataclass(frozen=True, slots=True)
class _Slot:
    """Page-locked memory for the scalars of one row, and the events that tell when they landed."""

    host: Any
    """A tensor of WIDTH elements of eight bytes."""
    home: list[_Slot]
    events: dict[int, Any] = field(default_factory=dict)
    """By number of the device: an event belongs to the one where it was first recorded."""
    views: dict[Any, tuple[Sequence[Any], Any]] = field(default_factory=dict)
    """By type: the same memory as tensors of one element each, and as an array."""

    def view(self, dtype: Any) -> tuple[Sequence[Any], Any]:
        """Return the memory as one of `views`; no element is larger than eight bytes."""
        view = self.views.get(dtype)
        if view is None:
            apart = self.host.element_size() // dtype.itemsize
            cells = self.host.view(dtype)[::apart]
            view = self.views[dtype] = cells.unbind(), cells.numpy()
        return view


@dataclass(frozen=True, slots=True)
class _Waiting:
    step: int
    ts: float
    row: Row
    keys: tuple[str, ...]
    slot: _Slot | None  # None: no slot was free, the scalars are dropped
    arrays: Sequence[Any]
    landed: Any


class DeviceScalars:
    """The rows of one recorder whose scalars are under way.

    Where the device fails, rows go on without their scalars: nothing here raises what CUDA raises.
    """

    def __init__(self, sink: RowSink) -> None:
        self._sink = sink
        self._waiting: deque[_Waiting] = deque()
        self._told = False
        self.dropped = 0
        """Rows that went on without some of their scalars."""

    def __len__(self) -> int:
        """Rows under way."""
        return len(self._waiting)

    def put(self, step: int, ts: float, row: Row, scalars: Mapping[str, Any]) -> None:
        """Queue the copy of the scalars (CUDA tensors of one element); never waits."""
        keys = tuple(scalars)[:WIDTH]
        slot, arrays, landed = self._start(keys, scalars) if keys else _NOTHING
        if scalars and (slot is None or len(keys) < len(scalars)):
            self.dropped += 1
        self._waiting.append(_Waiting(step, ts, row, keys, slot, arrays, landed))

    def poll(self) -> None:
        """Hand on the rows whose scalars have landed. What the sink raises is the caller's."""
        for _ in range(self._landed()):
            self._hand_on(self._waiting.popleft())

    def _landed(self) -> int:
        """Return how many rows may go on; none where the device fails, as all have gone then."""
        count = 0
        try:
            if self._waiting and not _is_capturing():  # else the question would end the capture
                for row in self._waiting:
                    if row.slot is not None and not row.landed.query():
                        break
                    count += 1
        except Exception as error:  # noqa: BLE001 - torch's own, whichever it raises
            self._give_up(error)
            return 0
        return count

    def flush(self, timeout_s: float | None = None) -> None:
        """Wait for all copies and hand on every row: at a command, an epoch's or the run's end.

        After `timeout_s` the rest goes on without its scalars: a device may hang for ever. What
        the sink raises is the caller's.
        """
        try:
            if timeout_s is None and self._waiting:
                if _is_capturing():
                    return
                for row in self._waiting:
                    if row.slot is not None:
                        row.landed.synchronize()
        except Exception as error:  # noqa: BLE001 - torch's own, whichever it raises
            self._give_up(error)
        until = time.monotonic() + (timeout_s or 0.0)
        self.poll()
        while self._waiting and time.monotonic() < until:
            time.sleep(POLL_S)
            self.poll()
        if self._waiting:
            self._give_up(TimeoutError("the GPU does not answer"))

    def _start(self, keys: tuple[str, ...], scalars: Mapping[str, Any]) -> _Started:
        """Begin the copies; return their slot, the arrays that they go to, and their event.

        No slot where the device or torch refuses.
        """
        slot = None
        try:
            device = scalars[keys[0]].device
            with _ordinary_mode(), _current(device):  # an event belongs to its copy's device
                if _is_capturing():
                    return _NOTHING
                slot = _take_slot()
                if slot is None:
                    return _NOTHING
                arrays = _copy([scalars[key] for key in keys], slot, device)
                landed = slot.events.get(device.index)
                if landed is None:
                    landed = slot.events[device.index] = _event()
                landed.record()
                return slot, arrays, landed
        except Exception as error:  # noqa: BLE001 - torch's own, whichever it raises
            self._tell(error)
        if slot is not None:
            slot.home.append(slot)
        return _NOTHING

    def _hand_on(self, waiting: _Waiting) -> None:
        slot = waiting.slot
        if slot is not None:
            values = [float(array[place]) for place, array in enumerate(waiting.arrays)]
            waiting.row.update(zip(waiting.keys, values, strict=True))
            slot.home.append(slot)
        self._sink(waiting.step, waiting.ts, waiting.row)

    def _give_up(self, error: Exception) -> None:
        """Hand on every row without its scalars; their slots may still be written to: not free."""
        global _free
        self._tell(error)
        _free = None
        while self._waiting:
            row = self._waiting.popleft()
            self.dropped += row.slot is not None
            self._sink(row.step, row.ts, row.row)

    def _tell(self, error: Exception) -> None:
        if not self._told:
            log.warning("stepscope: values on the GPU could not be read: %s", first_line(error))
        self._told = True


_Started = tuple[_Slot | None, Sequence[Any], Any]
_NOTHING: _Started = (None, (), None)

_free: list[_Slot] | None = None
"""The slots of this process that no row uses; None before the first, and after a failure."""


def _take_slot() -> _Slot | None:
    """Return the slot that was freed last: its views and its event are there already."""
    global _free
    if _free is None:
        _free = _new_slots(SLOTS)
    try:
        return _free.pop()
    except IndexError:
        return None


def _new_slots(count: int) -> list[_Slot]:
    host = _pinned(count, WIDTH)
    free: list[_Slot] = []
    slots = [_Slot(row, free) for row in host.unbind()]
    keep_for_good((host, slots))
    free.extend(slots)
    return free


def keep_for_good(kept: object) -> None:
    """Never free this, not even at the interpreter's end.

    Torch's deleters of page-locked memory and of events call CUDA, and end the process where it
    does not answer: in a forked child, and after an error that stays with the device.
    """
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(kept))


def _ordinary_mode() -> AbstractContextManager[Any]:
    """Leave the modes that the script is in: what is made or changed there may not be plain memory,
    and a script that counts operations must not find ours."""
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


def _copy(scalars: list[Any], slot: _Slot, device: Any) -> list[Any]:
    """Queue a copy of each scalar, of about 10 us; return the array in which each will stand.

    A scalar of a common type is copied as it is: to convert it would be another kernel. One of
    another device comes to this one first.
    """
    torch = sys.modules["torch"]
    plain = (torch.float32, torch.float64, torch.float16)
    arrays = []
    for place, scalar in enumerate(scalars):
        scalar = scalar.detach()
        if scalar.dim():
            scalar = scalar.reshape(())
        dtype = scalar.dtype if scalar.dtype in plain else torch.float64
        if scalar.device != device or scalar.dtype != dtype:
            scalar = scalar.to(device, dtype, non_blocking=True)
        cells, array = slot.view(dtype)
        cells[place].copy_(scalar, non_blocking=True)
        arrays.append(array)
    return arrays


def _pinned(slots: int, width: int) -> Any:
    """Return page-locked memory, whatever defaults the script has set."""
    torch = sys.modules["torch"]
    return torch.empty((slots, width), dtype=torch.float64, device="cpu", pin_memory=True)


def _event() -> Any:
    return sys.modules["torch"].cuda.Event()


def _is_capturing() -> bool:
    """A copy or an event inside a CUDA graph's capture would become part of the graph."""
    return bool(sys.modules["torch"].cuda.is_current_stream_capturing())
