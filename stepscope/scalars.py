"""Brings a step's scalars (loss, gradient norm, …) to the host without stopping the device.

`.item()` on a CUDA tensor waits until the device has caught up. `DeviceScalars` queues a copy into
page-locked memory instead and hands the row on some steps later, when the copy has landed. Rows
come out in order and whole; when all slots are in flight a row goes on without its scalars.

Torch is found in `sys.modules`: whoever has a tensor has imported it.
"""

from __future__ import annotations

import logging
import sys
import time
from collections import deque
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

log = logging.getLogger(__name__)

POLL_S = 0.005

Row = dict[str, float | None]
RowSink = Callable[[int, float, Row], None]
"""Takes (step, epoch seconds of the step boundary, values); called in order of the steps."""


@dataclass(frozen=True, slots=True)
class _Waiting:
    step: int
    ts: float
    row: Row
    keys: tuple[str, ...]
    slot: int | None  # None: no slot was free, the scalars are dropped


class DeviceScalars:
    """A ring of page-locked slots, each with the CUDA event that tells when its copy landed.

    Where the device fails, rows go on without their scalars: nothing here raises what CUDA raises.
    """

    def __init__(self, sink: RowSink, *, slots: int = 64, width: int = 8) -> None:
        self._sink = sink
        self._width = width
        self._host = _pinned(slots, width)
        self._landed: list[Any] = [None] * slots
        self._free = deque(range(slots))
        self._waiting: deque[_Waiting] = deque()
        self._told = False
        self.dropped = 0
        """Rows that went on without some of their scalars."""

    def __len__(self) -> int:
        """Rows under way."""
        return len(self._waiting)

    def put(self, step: int, ts: float, row: Row, scalars: Mapping[str, Any]) -> None:
        """Queue the copy of the scalars (CUDA tensors of one element); never waits."""
        keys = tuple(scalars)[: self._width]
        slot = self._start(keys, scalars) if keys else None
        if scalars and (slot is None or len(keys) < len(scalars)):
            self.dropped += 1
        self._waiting.append(_Waiting(step, ts, row, keys if slot is not None else (), slot))

    def poll(self) -> None:
        """Hand on the rows whose scalars have landed."""
        try:
            while self._waiting:
                slot = self._waiting[0].slot
                if slot is not None and not self._landed[slot].query():
                    return
                self._hand_on(self._waiting.popleft())
        except RuntimeError as error:
            self._give_up(error)

    def flush(self, timeout_s: float | None = None) -> None:
        """Wait for all copies and hand on every row: at a command, an epoch's or the run's end.

        After `timeout_s` the rest goes on without its scalars: a device may hang for ever.
        """
        try:
            if timeout_s is None:
                for row in self._waiting:
                    if row.slot is not None:
                        self._landed[row.slot].synchronize()
            until = time.monotonic() + (timeout_s or 0.0)
            self.poll()
            while self._waiting and time.monotonic() < until:
                time.sleep(POLL_S)
                self.poll()
        except RuntimeError as error:
            self._give_up(error)
        if self._waiting:
            self._give_up(TimeoutError("the GPU does not answer"))

    def _start(self, keys: tuple[str, ...], scalars: Mapping[str, Any]) -> int | None:
        """Begin the copy; return its slot, or None when none is free or the device refuses."""
        if not self._free:
            return None
        slot = self._free.popleft()
        device = scalars[keys[0]].device
        try:
            with _current(device):  # an event belongs to the stream, and the device, of its copy
                if not _is_capturing():
                    _copy([scalars[key] for key in keys], self._host[slot])
                    self._landed[slot] = _event()
                    self._landed[slot].record()
                    return slot
        except RuntimeError as error:
            self._tell(error)
        self._free.append(slot)
        return None

    def _hand_on(self, waiting: _Waiting) -> None:
        if waiting.slot is not None:
            values = self._host[waiting.slot, : len(waiting.keys)].tolist()
            waiting.row.update(zip(waiting.keys, values, strict=True))
            self._free.append(waiting.slot)
        self._sink(waiting.step, waiting.ts, waiting.row)

    def _give_up(self, error: Exception) -> None:
        """Hand on every row without its scalars; their slots may still be written to: not free."""
        self._tell(error)
        while self._waiting:
            row = self._waiting.popleft()
            self.dropped += bool(row.keys)
            self._sink(row.step, row.ts, row.row)

    def _tell(self, error: Exception) -> None:
        if not self._told:
            log.warning("stepscope: values on the GPU could not be read: %s", error)
        self._told = True


def _current(device: Any) -> AbstractContextManager[Any]:
    if device.type != "cuda":
        return nullcontext()
    guard: AbstractContextManager[Any] = sys.modules["torch"].cuda.device(device)
    return guard


def _copy(scalars: list[Any], slot: Any) -> None:
    """Queue one small kernel and one copy; a scalar of another device comes to the first's."""
    device = scalars[0].device
    flat = [scalar.detach().reshape(()).to(device, slot.dtype, non_blocking=True)
            for scalar in scalars]  # fmt: skip
    slot[: len(flat)].copy_(sys.modules["torch"].stack(flat), non_blocking=True)


def _pinned(slots: int, width: int) -> Any:
    torch = sys.modules["torch"]
    return torch.empty((slots, width), dtype=torch.float64, pin_memory=True)


def _event() -> Any:
    return sys.modules["torch"].cuda.Event()


def _is_capturing() -> bool:
    """A copy or an event inside a CUDA graph's capture would become part of the graph."""
    return bool(sys.modules["torch"].cuda.is_current_stream_capturing())
