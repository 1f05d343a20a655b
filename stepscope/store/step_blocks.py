"""Convert the slots of the ring, with step times and rates, into blocks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from stepscope.store import SeriesBlock
from stepscope.store.blocks import Event, Floats, missing, recorded
from stepscope.store.cuda_readback import MetricRow
from stepscope.store.ring import Slots

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
