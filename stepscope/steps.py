"""From slots of the ring to a block of the `steps` stream: columns, step time, broken losses."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from stepscope.ring import Slots
from stepscope.store import Block
from stepscope.store.frames import Floats

STEP_TIME = "perf/step_time"
RATE = "perf/samples_per_sec"
SAMPLES = "perf/samples"
TOKENS = "perf/tokens"
RATES = {SAMPLES: RATE, TOKENS: "perf/tokens_per_sec"}
"""Amounts of a step that are recorded as rates: divided here by its step time."""
RESTART = "perf/restart"
"""The one key of a row that only restarts the clock: time so far is no step time."""
LOSS = "train/loss"

Layouts = Sequence[tuple[tuple[str, ...], bool]]
Flags = NDArray[np.bool_]


@dataclass(frozen=True, slots=True)
class BrokenLoss:
    """The first step at which the loss was NaN or infinite."""

    ts: float
    step: int
    loss: float

    @property
    def text(self) -> str:
        """What the marker says."""
        return f"The loss is {self.loss} at step {self.step}"


@dataclass(slots=True)
class StepRows:
    """Turns slots into blocks, batch after batch, for one store.

    A timed row stands for one step and gets the time since the timed row before it, or since the
    RESTART between them. A value that is no finite number becomes NaN.
    """

    broken: list[BrokenLoss] = field(default_factory=list)
    """Found since it was last cleared."""
    _timed_before: float = np.nan
    _elapsed: float = np.nan
    _elapsed_step: float = np.nan
    _ts: float = -np.inf
    _step: float = -np.inf
    _loss_is_broken: bool = False

    def block(self, slots: Slots, layouts: Layouts) -> Block:
        """Return the rows of these slots, in order."""
        # The slots of one wide row follow each other with the same time and step.
        fresh = np.ones(len(slots), dtype=bool)
        fresh[1:] = (np.diff(slots["ts"]) != 0) | (np.diff(slots["step"]) != 0)
        row_of, starts = np.cumsum(fresh) - 1, np.flatnonzero(fresh)
        used = [layouts[number] for number in np.unique(slots["layout"])]
        keys = tuple(dict.fromkeys(key for names, _ in used for key in names))
        values = np.full((len(keys), len(starts)), np.nan)
        timed, bare = np.zeros((2, len(starts)), dtype=bool)
        for number in np.unique(slots["layout"]):
            names, is_timed = layouts[number]
            chosen = np.flatnonzero(slots["layout"] == number)
            lines = np.array([keys.index(name) for name in names], dtype=np.intp)
            values[np.ix_(lines, row_of[chosen])] = slots["values"][chosen, : len(names)].T
            timed[row_of[chosen]] |= is_timed
            bare[row_of[chosen]] |= RESTART in names
        self._watch_loss(slots, layouts)
        values[~np.isfinite(values)] = np.nan
        ts = slots["ts"][starts]
        if timed.any() or not {STEP_TIME, *RATES}.isdisjoint(keys):
            step = slots["step"][starts].astype(float)
            keys, values = self._with_times(keys, values, ts, step, timed, bare)
        ts, step = self._rising(ts[~bare], slots["step"][starts][~bare].astype(float))
        return Block.raw(keys, ts, step, values[:, ~bare])

    def _with_times(
        self, keys: tuple[str, ...], values: Floats, ts: Floats, step: Floats, timed: Flags,
        bare: Flags,
    ) -> tuple[tuple[str, ...], Floats]:  # fmt: skip
        """Add step time and, for rows that tell an amount, its rate."""
        elapsed = np.full(len(ts), np.nan)
        if timed.any():
            elapsed[timed] = np.diff(ts[timed], prepend=self._timed_before)
            self._timed_before = float(ts[timed][-1])
        elapsed[bare | (elapsed <= 0)] = np.nan  # a clock set back has no step time
        amounts = {RATES[key]: values[line] for line, key in enumerate(keys) if key in RATES}
        columns = {key: values[line] for line, key in enumerate(keys)
                   if key not in RATES and key != RESTART}  # fmt: skip
        if timed.any() or STEP_TIME in keys:
            _fill(columns, STEP_TIME, elapsed)
        duration = self._of_step(columns.get(STEP_TIME, elapsed), step)
        for key, amount in amounts.items():
            _fill(columns, key, amount / duration)
        return tuple(columns), np.array(list(columns.values())).reshape(len(columns), len(ts))

    def _of_step(self, elapsed: Floats, step: Floats) -> Floats:
        """Return the step time of each row's step: a row that only adds values has none itself."""
        elapsed = np.append(self._elapsed, elapsed)
        step = np.append(self._elapsed_step, step)
        last = np.maximum.accumulate(np.where(np.isnan(elapsed), 0, np.arange(len(elapsed))))
        found = np.where(step[last] == step, elapsed[last], np.nan)
        self._elapsed, self._elapsed_step = float(elapsed[last[-1]]), float(step[last[-1]])
        return found[1:]

    def _rising(self, ts: Floats, step: Floats) -> tuple[Floats, Floats]:
        """Let neither axis fall: two threads may have written in another order than they began."""
        if len(ts):
            ts = np.maximum.accumulate(np.maximum(ts, self._ts))
            step = np.maximum.accumulate(np.maximum(step, self._step))
            self._ts, self._step = float(ts[-1]), float(step[-1])
        return ts, step

    def _watch_loss(self, slots: Slots, layouts: Layouts) -> None:
        """Note each time that the loss turned from a number to NaN or infinity."""
        columns = [names.index(LOSS) if LOSS in names else -1 for names, _ in layouts]
        column = np.array(columns, dtype=np.intp)[slots["layout"]]
        have = np.flatnonzero(column >= 0)
        losses = slots["values"][have, column[have]]
        if not len(losses):
            return
        is_broken = ~np.isfinite(losses)
        turned = is_broken & ~np.append(self._loss_is_broken, is_broken[:-1])
        self._loss_is_broken = bool(is_broken[-1])
        for at in have[turned]:
            row = slots[at]
            loss = float(row["values"][column[at]])
            self.broken.append(BrokenLoss(float(row["ts"]), int(row["step"]), loss))


def _fill(columns: dict[str, Floats], key: str, values: Floats) -> None:
    """Add a column; what a row has given of it by itself stays."""
    given = columns.get(key)
    columns[key] = values if given is None else np.where(np.isnan(given), values, given)
