"""All recorded metrics, in one table per stream, as in docs/metrics.md.

Values are stored in the metric's unit (SI and bytes); only the page formats them.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
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


def _parsed(stream: Stream, table: str) -> Iterator[Metric]:
    for entry in re.split(r"\n(?=\S)", table.strip()):
        heading, *meaning = map(str.strip, entry.splitlines())
        key, label, *unit = heading.split(" | ")
        yield Metric(stream, key, Unit("".join(unit)), label, " ".join(meaning))


METRICS = (
    *_parsed(Stream.STEPS, tables.STEPS),
    *_parsed(Stream.SAMPLES, tables.SAMPLES),
    *_parsed(Stream.DEVICES, tables.DEVICES),
)
BY_KEY = {metric.key: metric for metric in METRICS}
