"""Values of all ranks of a job over time or over steps, in a fixed number of columns.

A column is the same stretch of the axis for every rank. Once the run is longer than all columns,
two of them become one, so memory and answers stay as small in a run of days. Each change of a
column has a number: who knows the number that a reader has seen sends it only what changed since.
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

COLUMNS = 120  # Columns there can be; even, and at least half of them are in use from 30 s on.
FIRST_WIDTHS = {"time": 0.25, "step": 1.0}
"""Of a column of each axis, in seconds or steps, until a run is longer than all columns."""
FURTHEST = 1e9
"""Seconds or steps further from the start of the run are of a broken clock or file: left out."""


@dataclass(frozen=True, slots=True)
class HeatmapMetric:
    """A metric over time: `highest` is drawn as the highest value of a column, else the mean."""

    name: str
    highest: bool = False


@dataclass(slots=True)
class _Cells:
    """(ranks, COLUMNS) of one strip; `changed` (COLUMNS,) numbers the last change of each."""

    sums: Floats
    counts: Floats
    tops: Floats
    changed: NDArray[np.int64]


@dataclass(slots=True)
class TimeGrid:
    """The strips of `ranks` ranks; used by one thread at a time.

    `generation` counts how often two columns became one: columns of another one mean other times.
    """

    strips: Sequence[HeatmapMetric]
    ranks: int
    width: float = FIRST_WIDTHS["time"]
    generation: int = 0
    _number: int = 0
    _cells: dict[str, _Cells] = field(default_factory=dict)

    def add(self, rank: int, xs: Floats, values: dict[str, tuple[Floats, Floats, Floats]]) -> None:
        """Add values of a rank at `xs` (n,), in seconds since the start of the run, or in steps.

        `values` has the mean, the highest value and the count (n,) by the name of the strip. What
        is missing or not finite is left out.
        """
        known = np.isfinite(xs) & (xs < FURTHEST)
        if not known.any():
            return
        self._widen(float(xs[known].max()))
        safe = np.where(known, np.maximum(xs, 0.0), 0.0)
        places = (safe / self.width).astype(np.intp)
        for strip in self.strips:
            if strip.name in values:
                self._put(strip, rank, places, known, *values[strip.name])

    def clear(self, rank: int, names: Iterable[str]) -> None:
        """Forget a rank's values of some strips: they are read anew."""
        for cells in (self._cells[name] for name in names if name in self._cells):
            touched = np.flatnonzero(cells.counts[rank])
            cells.sums[rank] = cells.counts[rank] = 0.0
            cells.tops[rank] = -np.inf
            self._touch(cells, touched)

    def recorded(self) -> list[str]:
        """Return the names of the strips that have a value, in their order."""
        return [strip.name for strip in self.strips if strip.name in self._cells]

    def since(self, name: str, seen: int, limit: int) -> tuple[NDArray[np.intp], int, bool]:
        """Return at most `limit` columns that changed after the number `seen`, oldest change first;
        the number that the reader has then seen; True where more wait."""
        cells = self._cells.get(name)
        if cells is None:
            return np.empty(0, dtype=np.intp), seen, False
        changed = np.flatnonzero(cells.changed > seen)
        ordered = changed[np.argsort(cells.changed[changed])]
        sent = ordered[: max(1, limit)]
        last = int(cells.changed[sent[-1]]) if len(sent) else seen
        return sent, last, len(ordered) > len(sent)

    def values(self, name: str, places: NDArray[np.intp]) -> Floats:
        """Return (len(places), ranks) values of a strip; NaN where there is none."""
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
        with np.errstate(over="ignore"):  # values of a broken file: shown as missing below
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
    """Return values as half floats of a share of `scale`, in base64: two bytes a value.

    The error is at most 0.05 % of the value, less than a page shows; a missing value is a NaN.

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
