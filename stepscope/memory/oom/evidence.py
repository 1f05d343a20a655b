"""Compute the figures of a failed allocation, and the memory trend before it; pure, no I/O."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any

import msgspec
import numpy as np

from stepscope.common.formatting import format_bytes
from stepscope.memory.growth import pair_slopes
from stepscope.memory.oom.record import HostMemory, OomRecord

FIRST_STEPS = 2  # Steps with atypical memory: optimizer state and workspaces are allocated.
MAX_GROUPS = 60  # Maximum number of groups of steps that are compared in pairs.
MIN_TREND_STEPS = 6  # Minimum number of different steps of a trend.
MIN_RISING_FRACTION = 0.9  # Minimum fraction of pairs of steps in which the later step has more.
MIN_CONFIRMED_FRACTION = 0.5  # Slope of the samples by an event's rate: below, growth has ended.
MAX_EVENT_VALUE = 1e15  # Maximum number of bytes or steps in a valid event.


@dataclass(frozen=True, slots=True)
class OomTrend:
    """Growth of allocated memory: bytes per step, number of steps with samples, bytes in total."""

    per_step: float
    steps: int
    grown: int


class _GrowthEvent(msgspec.Struct):
    """The fields of a `memory_growth` event that a trend needs."""

    bytes_per_step: Annotated[float, msgspec.Meta(gt=0, lt=MAX_EVENT_VALUE)]
    steps: Annotated[float, msgspec.Meta(gt=0, lt=MAX_EVENT_VALUE)]


def trend(record: OomRecord, growth: Mapping[str, Any] | None = None) -> OomTrend | None:
    """Return the growth of allocated memory, by the untrusted event `growth` or last samples."""
    points = _at_boundaries(record)
    # The lowest of each group: every third point of a periodic series would mislead.
    size = max(1, -(-len(points) // MAX_GROUPS))
    groups = (points[start : start + size] for start in range(0, len(points), size))
    lowest = [min(group, key=lambda point: point[1]) for group in groups]
    steps, values = np.array(lowest, float).reshape(-1, 2).T
    slopes = pair_slopes(steps, values)
    slope = float(np.median(slopes)) if len(slopes) else 0.0
    sampled = None
    if len(points) >= MIN_TREND_STEPS and slope > 0 and (slopes > 0).mean() >= MIN_RISING_FRACTION:
        span = points[-1][0] - points[0][0]
        grown = int(min(slope * span, points[-1][1] - points[0][1]))
        sampled = OomTrend(slope, span, grown) if grown > 0 else None
    try:
        event = msgspec.convert(growth, _GrowthEvent)
    except msgspec.ValidationError:
        return sampled
    grown = int(event.bytes_per_step * int(event.steps))
    # The event may be old: it counts unless the last samples contradict it.
    is_over = len(slopes) > 0 and slope < MIN_CONFIRMED_FRACTION * event.bytes_per_step
    if is_over or (sampled is not None and sampled.grown >= grown):
        return sampled
    return OomTrend(event.bytes_per_step, int(event.steps), grown)


def _at_boundaries(record: OomRecord) -> list[tuple[int, float]]:
    """Return (step, allocated bytes) at the end of the last steps: the lowest sample of each."""
    lowest: dict[int, float] = {}  # Samples inside a long step include that step's tensors.
    first = record.step - (record.steps_done or 0)  # not 0 for a resumed run
    for step, value in _column(record, "memory/allocated"):
        if step > FIRST_STEPS + first:
            lowest[step] = min(value, lowest.get(step, value))
    return sorted(lowest.items())


def usual_peak(record: OomRecord) -> int | None:
    """Return the peak of the completed steps in bytes; None without a sample."""
    if record.steps_done is None or record.steps_done < FIRST_STEPS:
        return None
    # The peak that is read after step n may include the step in progress.
    samples = _column(record, "memory/peak_allocated")
    return max((int(value) for step, value in samples if step < record.step), default=None)


def _column(record: OomRecord, key: str) -> list[tuple[int, float]]:
    pairs = zip(record.readings.steps, record.readings.columns.get(key, ()), strict=False)
    return [(step, value) for step, value in pairs if value is not None]


@dataclass(frozen=True, slots=True, kw_only=True)
class OomFigures:
    """The figures of a record that a verdict needs; bytes.

    `limit` is the maximum that this process may use of the device, `room` the bytes that the driver
    can still allocate, `outside` the bytes in use outside this process's PyTorch memory.
    """

    requested: int
    limit: int
    room: int
    allocated: int
    reserved: int
    outside: int

    @property
    def cached(self) -> int:
        """Bytes reserved and not allocated, in pieces."""
        return self.reserved - self.allocated

    @property
    def demand(self) -> int:
        """Bytes allocated and requested."""
        return self.allocated + self.requested


def figures_of(record: OomRecord) -> OomFigures | None:
    """Return the figures of a record; None if one is missing or they contradict each other."""
    requested, free = record.requested, record.free
    allocated, reserved = record.allocated, record.reserved
    limit = record.allowed or record.total
    if requested is None or free is None or allocated is None or reserved is None or limit is None:
        return None
    if requested <= 0 or free < 0 or limit <= 0 or not 0 <= allocated <= reserved:
        return None
    total = record.total or limit
    return OomFigures(
        requested=requested,
        limit=limit,
        room=free if limit >= total else min(free, max(0, limit - reserved)),
        allocated=allocated,
        reserved=reserved,
        outside=max(0, total - free - reserved),
    )


def evidence_of(
    record: OomRecord, figures: OomFigures | None = None, growth: OomTrend | None = None
) -> dict[str, str]:
    """Return the figures behind a verdict as text, by their label."""
    host = record.host or HostMemory()
    sizes: dict[str, Any] = {
        "Requested": record.requested,
        "Allocated (tensors)": record.allocated,
        "Reserved but free (fragmented)": figures and figures.cached,
        "Free on the device": record.free,
        "Other processes": record.others,
        "Outside of PyTorch's memory": figures and figures.outside,
        "Limit of this process": record.allowed,
        "Device total": record.total,
        "Peak of earlier steps": usual_peak(record),
        "Host, available": host.available,
        "Host in all": host.total,
        "This process": host.process,
        "Its child processes": host.children,
        "Container, used": host.limit_used,
        "Container, limit": host.limit,
    }
    shown = {name: format_bytes(size) for name, size in sizes.items() if size is not None}
    reason = record.others_reason if record.others is None else None
    texts = {
        "Other processes": reason and f"unknown: {reason}",
        "Growth of allocated": growth
        and f"{format_bytes(growth.per_step)} per step over {growth.steps:,} steps",
        "Model mode": {True: "training", False: "evaluation", None: None}[record.training],
        "Gradients": {True: "on", False: "off", None: None}[record.grad],
        "Model inputs": ", ".join(record.inputs),
        "Allocator settings": record.settings.text,
    }
    return shown | {name: text for name, text in texts.items() if text}
