"""Metric: key, stream, unit, source and meaning.

Keys have no unit: values are stored in the metric's unit (SI and bytes), and only the page formats
them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum


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


MetricTable = Mapping[str, tuple[Unit, str, str]]
"""Unit, label and meaning of each metric by its key."""
