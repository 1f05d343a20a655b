"""Convert the slots of the ring into blocks of rows, with rates, and find losses that break."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from stepscope.store import SeriesBlock
from stepscope.store.blocks import Event, Floats, recorded
from stepscope.store.ring import RingRows

STEP_TIME = "perf/step_time"
SAMPLES = "perf/samples"
RATE = "perf/samples_per_sec"
RATES = {SAMPLES: RATE, "perf/tokens": "perf/tokens_per_sec"}
"""Counts of a step that are recorded as rates: divided by its step time."""
LOSS = "train/loss"


@dataclass(slots=True)
class StepBlockBuilder:
    """Converts slots into blocks, batch after batch, for one store."""

    _ts: float = -np.inf
    _step: float = -np.inf
    _broken: frozenset[str] = frozenset()  # losses whose last value was not finite

    def block(self, rows: RingRows, epoch: int = 0) -> tuple[SeriesBlock, list[Event]]:
        """Return the rows, and an event for each loss that became NaN or infinite."""
        slots = rows.slots
        # The slots of one wide row follow each other with the same time and step.
        is_first = np.ones(len(slots), dtype=bool)
        is_first[1:] = (np.diff(slots["ts"]) != 0) | (np.diff(slots["step"]) != 0)
        row_of, firsts = np.cumsum(is_first) - 1, slots[is_first]
        columns: dict[str, Floats] = {}
        for number in sorted(set(slots["layout"].tolist())):  # np.unique imports numpy.ma: 10 ms
            chosen = np.flatnonzero(slots["layout"] == number)
            for place, key in enumerate(rows.layouts[number]):
                column = columns.setdefault(key, np.full(len(firsts), np.nan))
                column[row_of[chosen]] = recorded(slots["values"][chosen, place])
        for amount in RATES.keys() & columns.keys():
            with np.errstate(divide="ignore", invalid="ignore"):  # a step time of 0
                rate = columns.pop(amount) / columns.get(STEP_TIME, np.nan)
            columns.setdefault(RATES[amount], rate)
        # Two threads may write in another order than they claimed.
        ts = np.maximum.accumulate(np.append(self._ts, firsts["ts"]))
        step = np.maximum.accumulate(np.append(self._step, firsts["step"].astype(float)))
        self._ts, self._step = float(ts[-1]), float(step[-1])
        values = np.array([*columns.values()]).reshape(len(columns), len(firsts))
        block = SeriesBlock.raw((*columns,), ts[1:], step[1:], values)
        return block, self._loss_events(block, epoch)

    def _loss_events(self, block: SeriesBlock, epoch: int) -> list[Event]:
        events = []
        for row, key in enumerate(block.keys):
            given = np.flatnonzero(block.count[row] + block.nonfinite[row])
            if not len(given) or (key != LOSS and not key.startswith(f"{LOSS}.")):
                continue
            is_broken = block.nonfinite[row, given] > 0
            was_broken = np.append(key in self._broken, is_broken[:-1])
            self._broken = self._broken | {key} if is_broken[-1] else self._broken - {key}
            for at in given[is_broken & ~was_broken]:
                name = "" if key == LOSS else f"({key}) "
                step = int(block.step[at])
                text = f"The loss {name}is {block.mean[row, at]} at step {step}"
                events.append(Event(float(block.ts[at]), step, epoch, "nan", text, {}))
        return events
