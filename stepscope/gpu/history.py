"""The last ten minutes of a GPU in memory, one reading a second."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass

KEPT_S = 600.0
KEPT_READINGS = 600
"""About 0.4 MB a GPU (benchmarks/devices.py)."""

DRAWN = (
    "gpu/util",
    "gpu/sm_active",
    "gpu/tensor_active",
    "gpu/dram_active",
    "gpu/mem_used",
    "gpu/power",
    "gpu/temp",
    "gpu/sm_clock",
    "gpu/pcie_tx",
    "gpu/pcie_rx",
    "gpu/nvlink_tx",
    "gpu/nvlink_rx",
)
"""Metrics of which the page draws a line."""


@dataclass(frozen=True, slots=True)
class Reading:
    """All values of one GPU at `ts` (epoch seconds)."""

    ts: float
    values: tuple[float | None, ...]


class History:
    """The readings of one GPU; one thread adds, any may read."""

    def __init__(self, keys: tuple[str, ...]) -> None:
        self.keys = keys
        self.seen: set[str] = set()
        """Metrics that have had a value at some time."""
        self._readings: deque[Reading] = deque(maxlen=KEPT_READINGS)

    def add(self, ts: float, values: Mapping[str, float]) -> None:
        """Keep a reading, and forget what is too old."""
        self.seen |= values.keys()
        self._readings.append(Reading(ts, tuple(values.get(key) for key in self.keys)))
        while self._readings[0].ts < ts - KEPT_S:
            self._readings.popleft()

    def oldest(self, key: str) -> tuple[float, float] | None:
        """Return the time and value of a metric's oldest reading."""
        place = self.keys.index(key)
        for reading in tuple(self._readings):
            value = reading.values[place]
            if value is not None:
                return reading.ts, value
        return None

    def since(self, ts: float) -> list[Reading]:
        """Return the readings taken after `ts`."""
        return [reading for reading in tuple(self._readings) if reading.ts > ts]
