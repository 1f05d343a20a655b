"""Puts rows of steps into the ring: at once, or once their values have come from a GPU."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Mapping
from typing import Any

from stepscope.common.json_values import first_line, to_text
from stepscope.recorder.cuda_readback import DeviceScalars, Row
from stepscope.recorder.ring import WIDTH, Ring

log = logging.getLogger(__name__)

NAME_LIMIT = 500
"""Characters of a metric's name that are kept."""


class TimedRow(Row):
    """A row that stands for one step: the writer works out its step time."""


class RingWriter:
    """Sorts a row's values and hands it to the ring; `open_gate` lets the shorter way be taken.

    What is no number is left out, and the log says so once for each name.
    """

    ring: Ring
    """Set by the owner before the first row: the writer thread makes it, and may already ask what
    was dropped."""

    def __init__(self, open_gate: Callable[[], None]) -> None:
        self._open_gate = open_gate
        self.late: DeviceScalars | None = None
        """The rows whose values are under way; None before there was one."""
        self._late_lock = threading.RLock()  # a signal handler may come in the middle
        self._refused: set[str] = set()

    def record(self, step: int, ts: float, values: Mapping[str, Any], row: Row) -> None:
        """Sort plain numbers from tensors on a GPU and put the row into the ring, now or later."""
        tensors: dict[str, Any] = {}
        for key, value in values.items():
            if type(key) is not str or not key.isascii() or len(key) > NAME_LIMIT:
                key = to_text(key)[:NAME_LIMIT]
            if type(value) is float:
                row[key] = value
            elif value is not None:
                self.read(key, value, row, tensors)
        if not tensors and not self.late:
            self.put(step, ts, row)
            if self.ring.gate < 0:
                self._open_gate()
            return
        with self._late_lock:
            if self.late is None:
                self.late = DeviceScalars(self.put)
            self.late.poll()
            self.late.put(step, ts, row, tensors)
        # What writes without a check of its own must not overtake the rows that wait.
        self.ring.gate = -1

    def read(self, key: str, value: Any, row: Row, tensors: dict[str, Any]) -> None:
        """Put a value into the row, or into `tensors` where it is on a GPU."""
        try:
            if getattr(value, "is_cuda", False) and value.numel() == 1:
                tensors[key] = value
            else:
                row[key] = float(value.item() if hasattr(value, "item") else value)
        except Exception as error:  # noqa: BLE001 - of the script, which may raise anything
            self.refuse(key, error)

    def refuse(self, key: str, error: Exception) -> None:
        """Say once that a metric has values that cannot be recorded."""
        if key not in self._refused:
            self._refused.add(key)
            log.warning(
                "stepscope: %s: must be a number or a tensor of one element (%s); "
                "left out from here on without another word",
                key[:100],
                first_line(error),
            )

    def put(self, step: int, ts: float, row: Row) -> None:
        """Put a row of plain numbers into the ring."""
        timed = isinstance(row, TimedRow)
        if not row and not timed:
            return  # nothing was known of it
        keys = tuple(row)
        layout = self.ring.layout(keys, timed) if len(keys) <= WIDTH else None
        if layout is not None:
            self.ring.put(layout, ts, step, row.values())
            return
        # Several slots for a wide row; one a metric where the header holds no more combinations.
        size = WIDTH if len(keys) > WIDTH else 1
        if size >= len(keys):
            self.refuse(", ".join(keys), ValueError("too many different names"))
            return
        for start in range(0, len(keys), size):
            part = {key: row[key] for key in keys[start : start + size]}
            self.put(step, ts, type(row)(part))

    def settle(self, timeout_s: float | None) -> None:
        """Wait for the values under way and put their rows; after `timeout_s` without them."""
        late = self.late
        if late is not None and self._late_lock.acquire(timeout=timeout_s or -1):
            try:
                late.flush(timeout_s)
            finally:
                self._late_lock.release()
            self._open_gate()
