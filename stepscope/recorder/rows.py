"""Write rows into the ring, and convert its slots, with step times, into blocks."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from stepscope.common.json_values import first_line, to_text
from stepscope.recorder.cuda_readback import CudaScalarReadback, MetricRow
from stepscope.recorder.ring import WIDTH, RingBuffer, Slots
from stepscope.store import SeriesBlock
from stepscope.store.blocks import Event, Floats, missing, recorded

log = logging.getLogger(__name__)

NAME_LIMIT = 500  # maximum number of characters kept of a metric's name
STEP_TIME = "perf/step_time"
SAMPLES = "perf/samples"
RATE = "perf/samples_per_sec"
RATES = {SAMPLES: RATE, "perf/tokens": "perf/tokens_per_sec"}
"""Counts of a step that are recorded as rates: divided by its step time."""
RESTART = "perf/restart"  # The only key of a row that restarts the step clock.
LOSS = "train/loss"

Layouts = Sequence[tuple[tuple[str, ...], bool]]
Flags = NDArray[np.bool_]


@dataclass(slots=True)
class StepBlockBuilder:
    """Converts slots into blocks, batch after batch, for one store.

    A timed row is one step; its step time begins at the timed row, or the RESTART, before it.
    `broken` has an event, of epoch 0, for each loss that became NaN or infinite; the caller clears
    it.
    """

    broken: list[Event] = field(default_factory=list)
    _timed_before: float = np.nan
    _ts: float = -np.inf
    _step: float = -np.inf
    _broken_now: frozenset[str] = frozenset()  # losses whose last value was not finite

    def block(self, slots: Slots, layouts: Layouts) -> SeriesBlock:
        """Return the rows of these slots, in order."""
        # The slots of one wide row follow each other with the same time and step.
        fresh = np.ones(len(slots), dtype=bool)
        fresh[1:] = (np.diff(slots["ts"]) != 0) | (np.diff(slots["step"]) != 0)
        row_of, starts = np.cumsum(fresh) - 1, np.flatnonzero(fresh)
        numbers = sorted(set(slots["layout"].tolist()))  # np.unique imports numpy.ma: 10 ms
        used = [layouts[number] for number in numbers]
        keys = tuple(dict.fromkeys(key for names, _ in used for key in names))
        values = np.full((len(keys), len(starts)), np.nan)
        timed, bare = np.zeros((2, len(starts)), dtype=bool)
        for number in numbers:
            names, is_timed = layouts[number]
            chosen = np.flatnonzero(slots["layout"] == number)
            lines = np.array([keys.index(name) for name in names], dtype=np.intp)
            given = recorded(slots["values"][chosen, : len(names)].T)
            values[np.ix_(lines, row_of[chosen])] = given
            timed[row_of[chosen]] |= is_timed
            bare[row_of[chosen]] |= RESTART in names
        for key in keys:
            if key == LOSS or key.startswith(f"{LOSS}."):
                self._note_broken_loss(key, slots, layouts)
        ts = slots["ts"][starts]
        if timed.any():
            keys, values = self._with_times(keys, values, ts, timed, bare)
        ts, step = self._rising(ts[~bare], slots["step"][starts][~bare].astype(float))
        return SeriesBlock.raw(keys, ts, step, values[:, ~bare])

    def _with_times(
        self, keys: tuple[str, ...], values: Floats, ts: Floats, timed: Flags, bare: Flags
    ) -> tuple[tuple[str, ...], Floats]:
        elapsed = np.full(len(ts), np.nan)
        elapsed[timed] = np.diff(ts[timed], prepend=self._timed_before)
        self._timed_before = float(ts[timed][-1])
        elapsed[bare | (elapsed <= 0)] = np.nan  # a clock set back has no step time
        columns = {
            key: values[line]
            for line, key in enumerate(keys)
            if key not in RATES and key != RESTART
        }
        _fill(columns, STEP_TIME, elapsed)
        for amount in RATES.keys() & set(keys):
            rate = values[keys.index(amount)] / elapsed
            _fill(columns, RATES[amount], np.where(np.isfinite(rate), rate, np.nan))
        return tuple(columns), np.array(list(columns.values())).reshape(len(columns), len(ts))

    def _rising(self, ts: Floats, step: Floats) -> tuple[Floats, Floats]:
        """Make both axes monotonic: two threads may write in another order than they claimed."""
        if len(ts):
            ts = np.maximum.accumulate(np.maximum(ts, self._ts))
            step = np.maximum.accumulate(np.maximum(step, self._step))
            self._ts, self._step = float(ts[-1]), float(step[-1])
        return ts, step

    def _note_broken_loss(self, key: str, slots: Slots, layouts: Layouts) -> None:
        """Add each change of a loss from a number to NaN or infinity."""
        columns = [names.index(key) if key in names else -1 for names, _ in layouts]
        column = np.array(columns, dtype=np.intp)[slots["layout"]]
        have = np.flatnonzero(column >= 0)
        losses = slots["values"][have, column[have]]
        is_broken = ~np.isfinite(losses)
        turned = is_broken & ~np.append(key in self._broken_now, is_broken[:-1])
        self._broken_now = (self._broken_now | {key}) if is_broken[-1] else self._broken_now - {key}
        name = "" if key == LOSS else f"({key}) "
        for at in have[turned]:
            row = slots[at]
            step, loss = int(row["step"]), float(row["values"][column[at]])
            text = f"The loss {name}is {loss} at step {step}"
            self.broken.append(Event(float(row["ts"]), step, 0, "nan", text, {}))


def _fill(columns: dict[str, Floats], key: str, values: Floats) -> None:
    """Add a column; recorded values are kept."""
    given = columns.get(key)
    columns[key] = values if given is None else np.where(missing(given), values, given)


class TimedRow(MetricRow):
    """Row of one step: the writer computes its step time."""


class RowWriter:
    """Puts rows into the ring; omits values that are no numbers, and logs each such name once."""

    ring: RingBuffer  # set by the owner before the first row; the writer thread creates it

    def __init__(self, open_gate: Callable[[], None]) -> None:
        self._open_gate = open_gate
        self.late: CudaScalarReadback | None = None
        """Rows pending for values on a GPU; None before the first."""
        self._late_lock = threading.RLock()  # a signal handler may come in the middle
        self._refused: set[str] = set()

    def record(self, step: int, ts: float, values: Mapping[str, Any], row: MetricRow) -> None:
        """Put a row into the ring, now or when its tensors on a GPU have been copied."""
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
            if self.ring.gate < self.ring.end:
                self._open_gate()
            return
        with self._late_lock:
            if self.late is None:
                self.late = CudaScalarReadback(self.put)
            self.late.poll()
            self.late.put(step, ts, row, tensors)
        # The fast path must not overtake the pending rows.
        self.ring.gate = -1

    def read(self, key: str, value: Any, row: MetricRow, tensors: dict[str, Any]) -> None:
        """Put a value into the row, or into `tensors` if it is on a GPU."""
        try:
            if getattr(value, "is_cuda", False) and value.numel() == 1:
                tensors[key] = value
            else:
                row[key] = float(value.item() if hasattr(value, "item") else value)
        except Exception as error:  # noqa: BLE001 - of the script, which may raise anything
            self.refuse(key, error)

    def refuse(self, key: str, error: Exception) -> None:
        """Log once that values of a metric cannot be recorded."""
        if key not in self._refused:
            self._refused.add(key)
            log.warning(
                "stepscope: %s: must be a number or a tensor of one element (%s); omitted from now "
                "on, without another warning",
                key[:100],
                first_line(error),
            )

    def put(self, step: int, ts: float, row: MetricRow) -> None:
        """Put a row of plain numbers into the ring."""
        timed = isinstance(row, TimedRow)
        if not row and not timed:
            return
        keys = tuple(row)
        layout = self.ring.layout(keys, timed) if len(keys) <= WIDTH else None
        if layout is not None:
            self.ring.put(layout, ts, step, row.values())
            return
        # Several slots for a wide row; one per metric if the header is full of combinations.
        size = WIDTH if len(keys) > WIDTH else 1
        if size >= len(keys):
            self.refuse(", ".join(keys), ValueError("too many different names"))
            return
        for start in range(0, len(keys), size):
            part = {key: row[key] for key in keys[start : start + size]}
            self.put(step, ts, type(row)(part))

    def settle(self, timeout_s: float | None) -> None:
        """Wait for the values on GPUs and put their rows; after `timeout_s`, without values."""
        late = self.late
        if late is not None and self._late_lock.acquire(timeout=timeout_s or -1):
            try:
                late.flush(timeout_s)
            finally:
                self._late_lock.release()
            self._open_gate()
