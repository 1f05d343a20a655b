"""Convert the slots of the ring into blocks of rows, with rates, and find losses that break."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from stepscope.common.metrics import Stream
from stepscope.store.blocks import Event, Floats, SeriesBlock, recorded
from stepscope.store.ring import RingRows, Slots

STEPS = (Stream.STEPS, "")  # the series of the steps: its stream and source
STEP_TIME = "perf/step_time"
SAMPLES = "perf/samples"
RATE = "perf/samples_per_sec"
RATES = {SAMPLES: RATE, "perf/tokens": "perf/tokens_per_sec"}
"""Counts of a step that are recorded as rates: divided by its step time."""
LOSS = "train/loss"


def series_blocks(rows: RingRows) -> dict[tuple[str, ...], SeriesBlock]:
    """Return the new rows of each series by stream and source; those of steps may be none."""
    layouts = rows.layouts
    names = dict.fromkeys([STEPS, *(layout[:2] for layout in layouts)])
    numbers = {name: number for number, name in enumerate(names)}
    series_of = np.array([numbers[layout[:2]] for layout in layouts], dtype=np.intp)
    series = series_of[rows.slots["layout"]]
    return {name: _block(rows.slots[series == at], layouts) for name, at in numbers.items()}


def _block(slots: Slots, layouts: Sequence[tuple[str, ...]]) -> SeriesBlock:
    """Return the rows of one series, with rates in place of counts."""
    # The slots of one wide row follow each other with the same time and step.
    is_first = np.ones(len(slots), dtype=bool)
    is_first[1:] = (np.diff(slots["ts"]) != 0) | (np.diff(slots["step"]) != 0)
    row_of = np.cumsum(is_first) - 1
    firsts = slots[is_first]
    columns: dict[str, Floats] = {}
    for number in sorted(set(slots["layout"].tolist())):  # np.unique imports numpy.ma: 10 ms
        chosen = slots["layout"] == number
        for place, key in enumerate(layouts[number][2:]):
            column = columns.setdefault(key, np.full(len(firsts), np.nan))
            column[row_of[chosen]] = recorded(slots["values"][chosen, place])
    for amount in RATES.keys() & columns.keys():
        with np.errstate(divide="ignore", invalid="ignore"):  # a step time of 0
            rate = columns.pop(amount) / columns.get(STEP_TIME, np.nan)
        columns.setdefault(RATES[amount], rate)
    values = np.array([*columns.values()]).reshape(len(columns), len(firsts))
    return SeriesBlock.raw(tuple(columns), firsts["ts"], firsts["step"].astype(float), values)


def find_broken_losses(block: SeriesBlock, known: set[str], epoch: int = 0) -> list[Event]:
    """Return an event for each loss that is NaN or infinite first here; add them to `known`."""
    events = []
    for row, key in enumerate(block.keys):
        is_loss = key == LOSS or key.startswith(f"{LOSS}.")
        if is_loss and key not in known and block.nonfinite[row].any():
            known.add(key)
            at = int(np.argmax(block.nonfinite[row]))
            name = "" if key == LOSS else f"({key}) "
            step = int(block.step[at])
            text = f"The loss {name}is {block.mean[row, at]} at step {step}"
            events.append(Event(float(block.ts[at]), step, epoch, "nan", text, {}))
    return events
