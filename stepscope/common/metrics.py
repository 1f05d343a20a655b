"""All recorded metrics, in one table per stream, as in docs/metrics.md.

Values are stored in the metric's unit (SI and bytes); only the page formats them.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from stepscope.common import metric_tables as tables


class Stream(StrEnum):
    """The series streams of a run's store (`docs/storage.md`)."""

    STEPS = "steps"
    SAMPLES = "samples"
    DEVICES = "devices"


class Unit(StrEnum):
    """Units as stored."""

    NONE = ""
    BYTES = "B"
    PERCENT = "%"
    WATT = "W"
    JOULE = "J"
    CELSIUS = "°C"
    MEGAHERTZ = "MHz"
    SECOND = "s"
    PER_SECOND = "1/s"
    BYTES_PER_SECOND = "B/s"
    TERAFLOPS = "TFLOP/s"
    COUNT = "count"
    MASK = "bit mask"


@dataclass(frozen=True, slots=True)
class Metric:
    """One metric: `key` is `group/name`. docs/metrics.md also has the source of each."""

    stream: Stream
    key: str
    unit: Unit
    label: str
    meaning: str


_TABLES = {
    Stream.STEPS: tables.STEPS,
    Stream.SAMPLES: tables.SAMPLES,
    Stream.DEVICES: tables.DEVICES,
}
METRICS = tuple(
    Metric(stream, key, Unit(unit), label, meaning)
    for stream, table in _TABLES.items()
    for key, label, unit, meaning in table
)
BY_KEY = {metric.key: metric for metric in METRICS}
LOWER_IS_BETTER = frozenset(("train/loss", "val/loss"))
HIGHER_IS_BETTER = frozenset(("val/accuracy",))
"""Metrics with a best value. The name of a script's own metric does not tell which is better."""
