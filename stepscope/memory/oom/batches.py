"""Allocated memory from batch to batch where no `backward()` runs, as in an evaluation."""

from __future__ import annotations

import sys
from typing import Any

from stepscope.memory import allocator
from stepscope.memory.growth import GrowthTrend

MIN_LEVELS = 4
ALL_UNTIL = 8  # Batches after which only powers of two are read, in 5 us.
MIN_RATE, MAX_RATE = 0.5, 2.0  # Of each part, as a multiple of the mean rate.


class BatchMemory:
    """Levels at some batches of the present pass. Training thread only."""

    def __init__(self) -> None:
        self.number = 0  # Batches since the last `backward()`, of one pass.
        self._place: Any = None
        self._device = 0
        self._levels: list[tuple[int, float]] = []

    def add(self, *place: int) -> None:
        """Count a fetched batch; another `place` starts a new count.

        The first batch is not read: in training each one is the first since a `backward()`.
        """
        if place != self._place:
            self._place, self.number = place, 0
            self._levels.clear()
        self.number += 1
        is_read = self.number <= ALL_UNTIL or not self.number & (self.number - 1)
        if self.number > 1 and is_read and allocator.reason() is None:
            self._device = sys.modules["torch"].cuda.current_device()
            level = allocator.read(self._device).get("memory/allocated")
            if level is not None:
                self._levels.append((self.number, level))

    def trend(self, device: int) -> GrowthTrend | None:
        """Return the growth on a device up to now if each batch has added to it, else None."""
        if len(self._levels) < MIN_LEVELS or device != self._device:
            return None
        (first, lowest), (last, highest) = self._levels[0], self._levels[-1]
        mean = (highest - lowest) / (last - first)
        for (start, low), (end, high) in zip(self._levels, self._levels[1:], strict=False):
            if not MIN_RATE * mean < (high - low) / (end - start) < MAX_RATE * mean:
                return None
        return GrowthTrend(first, self.number, lowest, lowest + mean * (self.number - first))
