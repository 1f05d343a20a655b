"""Heatmap values of all ranks over time or steps, in a fixed number of columns.

A column covers the same interval for every rank. Once the run exceeds all columns, pairs of
columns merge, so memory and answers stay small in a run of days. Changes of columns are numbered:
a reader that sends the last number it has seen receives only later changes.
"""

from __future__ import annotations

import base64
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from stepscope.store.blocks import Floats

COLUMNS = 120  # even; at least half are used from 30 s on
FIRST_WIDTHS = {"time": 0.25, "step": 1.0}
"""Initial width of a column on each axis, in seconds or steps."""
MAX_X = 1e9  # larger values come from a wrong clock or a damaged file


@dataclass(frozen=True, slots=True)
class HeatmapMetric:
    """A metric of the heatmap: the maximum of a column if `highest`, else the mean."""

    name: str
    highest: bool = False


@dataclass(slots=True)
class _Cells:
    """(ranks, COLUMNS) values of one metric; `changed` (COLUMNS,): number of the last change."""

    sums: Floats
    counts: Floats
    tops: Floats
    changed: NDArray[np.int64]


@dataclass(slots=True)
class TimeGrid:
    """Heatmap values of `ranks` ranks. Not thread-safe.

    `generation` counts the merges of columns: a column's interval differs between generations.
    """

    strips: Sequence[HeatmapMetric]
    ranks: int
    width: float = FIRST_WIDTHS["time"]
    generation: int = 0
    _number: int = 0
    _cells: dict[str, _Cells] = field(default_factory=dict)

    def add(self, rank: int, xs: Floats, values: dict[str, tuple[Floats, Floats, Floats]]) -> None:
        """Add values of a rank at `xs` (n,), in seconds since the start of the run, or in steps.

        `values` holds mean, maximum and count (n,) by metric. Values that are not finite are
        omitted.
        """
        known = np.isfinite(xs) & (xs < MAX_X)
        if not known.any():
            return
        self._widen(float(xs[known].max()))
        safe = np.where(known, np.maximum(xs, 0.0), 0.0)
        places = (safe / self.width).astype(np.intp)
        for strip in self.strips:
            if strip.name in values:
                self._put(strip, rank, places, known, *values[strip.name])

    def clear(self, rank: int, names: Iterable[str]) -> None:
        """Delete a rank's values of some metrics before they are read again."""
        for cells in (self._cells[name] for name in names if name in self._cells):
            touched = np.flatnonzero(cells.counts[rank])
            cells.sums[rank] = cells.counts[rank] = 0.0
            cells.tops[rank] = -np.inf
            self._touch(cells, touched)

    def recorded(self) -> list[str]:
        """Return the names of the metrics that have a value, in the order of `strips`."""
        return [strip.name for strip in self.strips if strip.name in self._cells]

    def since(self, name: str, seen: int, limit: int) -> tuple[NDArray[np.intp], int, bool]:
        """Return at most `limit` columns changed after `seen`, the oldest change first.

        Also returns the number of the last returned change, and True if more columns changed.
        """
        cells = self._cells.get(name)
        if cells is None:
            return np.empty(0, dtype=np.intp), seen, False
        changed = np.flatnonzero(cells.changed > seen)
        ordered = changed[np.argsort(cells.changed[changed])]
        sent = ordered[: max(1, limit)]
        last = int(cells.changed[sent[-1]]) if len(sent) else seen
        return sent, last, len(ordered) > len(sent)

    def values(self, name: str, places: NDArray[np.intp]) -> Floats:
        """Return (len(places), ranks) values of a metric; NaN where missing."""
        cells = self._cells[name]
        counts = cells.counts[:, places].T
        if next(strip for strip in self.strips if strip.name == name).highest:
            return np.where(counts > 0, cells.tops[:, places].T, np.nan)
        sums = cells.sums[:, places].T
        return np.divide(sums, counts, out=np.full_like(sums, np.nan), where=counts > 0)

    def _put(
        self,
        strip: HeatmapMetric,
        rank: int,
        places: NDArray[np.intp],
        known: NDArray[np.bool_],
        mean: Floats,
        high: Floats,
        count: Floats,
    ) -> None:
        good = known & (count > 0) & np.isfinite(mean) & np.isfinite(high)
        if not good.any():
            return
        cells = self._cells.get(strip.name)
        if cells is None:
            cells = self._cells[strip.name] = _empty(self.ranks)
        at, weight = places[good], count[good]
        with np.errstate(over="ignore"):  # of damaged files; shown as missing
            cells.sums[rank] += np.bincount(at, mean[good] * weight, COLUMNS)
        cells.counts[rank] += np.bincount(at, weight, COLUMNS)
        np.maximum.at(cells.tops[rank], at, high[good])
        self._touch(cells, np.unique(at))

    def _touch(self, cells: _Cells, places: NDArray[np.intp]) -> None:
        cells.changed[places] = self._number + 1 + np.arange(len(places))
        self._number += len(places)

    def _widen(self, latest: float) -> None:
        while latest >= COLUMNS * self.width:
            self.width *= 2
            self.generation += 1
            for cells in self._cells.values():
                for row in (cells.sums, cells.counts):
                    row[:, : COLUMNS // 2] = row[:, 0::2] + row[:, 1::2]
                    row[:, COLUMNS // 2 :] = 0.0
                cells.tops[:, : COLUMNS // 2] = np.maximum(cells.tops[:, 0::2], cells.tops[:, 1::2])
                cells.tops[:, COLUMNS // 2 :] = -np.inf
                used = np.flatnonzero(cells.counts.any(axis=0))
                cells.changed[:] = 0
                self._touch(cells, used)


def packed(values: Floats) -> dict[str, Any]:
    """Return values as base64 half floats, divided by `scale`: two bytes per value.

    The error is at most 0.05% of the value; a missing value is NaN.

    >>> packed(np.array([[2.0, 1.0, np.nan]]))
    {'scale': 2.0, 'data': 'ADwAOAB+'}
    """
    finite = np.abs(values[np.isfinite(values)])
    top = float(finite.max()) if len(finite) else 0.0
    scale = 2.0 ** min(math.ceil(math.log2(top)), 1023) if top > 0 else 1.0
    shares = np.where(np.isfinite(values), values, np.nan) / scale
    return {"scale": scale, "data": base64.b64encode(shares.astype("<f2").tobytes()).decode()}


def _empty(ranks: int) -> _Cells:
    shape = (ranks, COLUMNS)
    return _Cells(
        np.zeros(shape), np.zeros(shape), np.full(shape, -np.inf), np.zeros(COLUMNS, dtype=np.int64)
    )
