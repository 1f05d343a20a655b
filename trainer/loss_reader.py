"""Brings a step's scalars (loss, gradient norm, …) to the host without stopping the device.

`.item()` on a CUDA tensor waits until the device has caught up. `RingReader` queues a copy into
page-locked memory instead and logs the row some steps later, when the copy has landed. Rows come
out in order and whole; when all slots are in flight a row is logged without its scalars.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

Row = dict[str, float | None]
RowSink = Callable[[int, float, Row], None]
"""Takes (step, epoch seconds of the step boundary, values); called in order of the steps."""


class HostReader:
    """On a CPU the values are there at once."""

    def __init__(self, sink: RowSink) -> None:
        self._sink = sink

    def put(self, step: int, ts: float, row: Row, scalars: Mapping[str, Tensor]) -> None:
        """Log the row with the scalars (0-d tensors) read into it."""
        for key, scalar in scalars.items():
            row[key] = scalar.item()
        self._sink(step, ts, row)

    def poll(self) -> None:
        """Do nothing: every row has been logged."""

    def flush(self) -> None:
        """Do nothing: every row has been logged."""


@dataclass(frozen=True, slots=True)
class _Waiting:
    step: int
    ts: float
    row: Row
    keys: tuple[str, ...]
    slot: int | None  # None: the ring was full, the scalars are dropped


class RingReader:
    """A ring of page-locked slots, each with the CUDA event that tells when its copy landed."""

    def __init__(self, sink: RowSink, *, slots: int = 64, width: int = 8) -> None:
        self._sink = sink
        self._host = _pinned(slots, width)
        self._landed = [_event() for _ in range(slots)]
        self._free = deque(range(slots))
        self._waiting: deque[_Waiting] = deque()
        self.dropped = 0

    def put(self, step: int, ts: float, row: Row, scalars: Mapping[str, Tensor]) -> None:
        """Queue the copy of the scalars (0-d CUDA tensors); never waits."""
        slot = self._free.popleft() if self._free else None
        if slot is None:
            self.dropped += 1
        else:
            stacked = torch.stack([scalar.detach().float() for scalar in scalars.values()])
            self._host[slot, : len(scalars)].copy_(stacked, non_blocking=True)
            self._landed[slot].record()
        self._waiting.append(_Waiting(step, ts, row, tuple(scalars), slot))

    def poll(self) -> None:
        """Log the rows whose scalars have landed."""
        while self._waiting:
            slot = self._waiting[0].slot
            if slot is not None and not _has_landed(self._landed[slot]):
                return
            self._log(self._waiting.popleft())

    def flush(self) -> None:
        """Wait for all copies and log every row: at an epoch's end, a command, the run's end."""
        while self._waiting:
            row = self._waiting.popleft()
            if row.slot is not None:
                self._landed[row.slot].synchronize()
            self._log(row)

    def _log(self, waiting: _Waiting) -> None:
        if waiting.slot is not None:
            values = self._host[waiting.slot, : len(waiting.keys)].tolist()
            waiting.row.update(zip(waiting.keys, values, strict=True))
            self._free.append(waiting.slot)
        self._sink(waiting.step, waiting.ts, waiting.row)


def _pinned(slots: int, width: int) -> Tensor:
    return torch.empty((slots, width), dtype=torch.float32, pin_memory=True)


def _event() -> torch.cuda.Event:
    return torch.cuda.Event()  # type: ignore[no-untyped-call]


def _has_landed(event: torch.cuda.Event) -> bool:
    return bool(event.query())  # type: ignore[no-untyped-call]


Reader = HostReader | RingReader
