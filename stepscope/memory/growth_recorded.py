"""Memory that grew in a recorded run: what its events tell, or else what its samples show."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from stepscope.memory.growth import LEAST_READINGS, Growth, Where, find_trend, is_material
from stepscope.memory.growth_batches import batches_grow
from stepscope.memory.growth_detector import EVENT, GROUPS, WARM_UP_STEPS
from stepscope.metrics import Stream
from stepscope.store import Block, EventRow, RunReader
from stepscope.store.blocks import Floats

BUCKETS = 1024
"""Buckets of the samples that are read, at most: a few frames, whatever the run's length."""


def told_growth(events: Iterable[EventRow]) -> tuple[str, str | None] | None:
    """Return the text of the newest event of growth and what to look at; None without one."""
    found = [event for event in events if event.kind == EVENT]
    if not found:
        return None
    text, advice = found[-1].text, found[-1].data.get("next")
    if not isinstance(advice, str):  # the file may be foreign
        return text, None
    return text.removesuffix(advice).strip(), advice


def recorded_growth(reader: RunReader, run_json: Mapping[str, Any]) -> Growth | None:
    """Return growth that goes on at the end of the samples, None where none is certain.

    Raises StoreError.
    """
    series = {(info.stream, info.source): info for info in reader.series()}
    info = series.get((Stream.SAMPLES.value, ""))
    if info is None or info.rows == 0:
        return None
    bucket = 1 << max(0, (info.rows - 1) // BUCKETS).bit_length()
    block = reader.read(info.id, 0, info.rows, bucket)
    filling = run_json.get("epoch") == 1
    children = _carried(_low(block, "process/children_rss"))
    allocated, peaks = _low(block, "memory/allocated"), _low(block, "memory/peak_allocated")
    return _grown(block, Where.ALLOCATED, allocated, peaks=peaks) or _grown(
        block, Where.PROCESS, _low(block, "process/rss") + children, filling=filling
    )


def _grown(
    block: Block,
    where: Where,
    values: Floats,
    *,
    peaks: Floats | None = None,
    filling: bool = False,
) -> Growth | None:
    """Return the growth of one kind of memory; `values` and `peaks` have one of every bucket.

    With peaks, what grows with the batches is none.
    """
    known = np.flatnonzero(np.isfinite(values) & (block.step > 0))
    if not len(known):
        return None
    known = known[block.step[known] >= block.step[known[0]] + WARM_UP_STEPS]
    starts, values = _floors(block.step[known], values[known])
    steps, times = block.step[known][starts], block.ts[known][starts]
    highs = None if peaks is None else peaks[known][starts]
    for newest in (GROUPS, LEAST_READINGS):
        window, before = values[-newest:], values[:-newest]
        trend = find_trend(steps[-newest:], window)
        if trend is None or len(before) and before.max() >= window[-1]:
            continue
        if highs is not None and batches_grow(steps[-newest:], window, highs[-newest:]):
            continue
        if is_material(trend, where.value, times[-1] - times[-len(window)], filling=filling):
            return Growth(where=where, trend=trend)
    return None


def _floors(steps: Floats, values: Floats) -> tuple[NDArray[np.intp], Floats]:
    """Return the first place and the lowest value of up to GROUPS groups of different steps."""
    firsts = np.flatnonzero(np.diff(steps, prepend=-1))
    starts = firsts[:: max(1, -(-len(firsts) // GROUPS))]
    return starts, np.minimum.reduceat(values, starts) if len(starts) else values


def _low(block: Block, key: str) -> Floats:
    if key not in block.keys:
        return np.full(len(block), np.nan)
    values: Floats = block.low[block.keys.index(key)]
    return values


def _carried(values: Floats) -> Floats:
    """Return the values with the last one in place of each that is missing; 0 before the first."""
    last = np.maximum.accumulate(np.where(np.isfinite(values), np.arange(len(values)), -1))
    carried: Floats = np.where(last >= 0, values[np.maximum(last, 0)], 0.0)
    return carried
