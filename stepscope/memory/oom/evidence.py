"""Compute the figures of a failed allocation, and the memory trend before it. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from stepscope.common.formatting import format_bytes
from stepscope.memory.oom.record import HostMemory, OomRecord
from stepscope.store.blocks import Floats

FIRST_STEPS = 2
"""Steps whose memory is not typical: optimizer state and workspaces of libraries are allocated."""
TREND_STEPS = 6  # Minimum number of different steps of a trend.
COMPARED = 60  # Maximum number of groups of steps of a trend.
LARGEST = 1e15  # Maximum number of bytes or steps in an event.
CONFIRMED = 0.5
"""Minimum growth of the last steps, as a share of an event's rate: below, growth has ended."""
RISES = 0.9  # Minimum share of the pairs of steps of a trend in which the later one has more.
OUTSIDE = 0.25
"""Share of the device held outside torch by unknown processes from which no case is named: a
context and its libraries take less."""


@dataclass(frozen=True, slots=True)
class OomTrend:
    """Growth of allocated memory: bytes per step, over how many steps, and bytes in all.

    Steps without readings do not count.
    """

    per_step: float
    steps: int
    grown: int


def trend(record: OomRecord, growth: Mapping[str, Any] | None = None) -> OomTrend | None:
    """Return the growth of allocated memory, from the run's event of it or from the last samples.

    `growth` is the event's data (`bytes_per_step`, `steps`), checked here. It may be old: it counts
    unless the last samples contradict it.
    """
    points = _at_boundaries(record)
    # The lowest of each group: every third point of what goes up every third step would mislead.
    every = max(1, -(-len(points) // COMPARED))
    groups = [points[start : start + every] for start in range(0, len(points), every)]
    slopes = _slopes([min(group, key=lambda point: point[1]) for group in groups])
    slope = float(np.median(slopes)) if len(slopes) else 0.0
    seen = None
    if len(points) >= TREND_STEPS and slope > 0 and (slopes > 0).mean() >= RISES:
        steps = points[-1][0] - points[0][0]
        grown = int(min(slope * steps, points[-1][1] - points[0][1]))
        seen = OomTrend(slope, steps, grown) if grown > 0 else None
    told = _of_event(growth)
    if told is None or (seen is not None and seen.grown >= told.grown):
        return seen
    goes_on = len(points) < 2 or slope >= CONFIRMED * told.per_step
    return told if goes_on else seen


def _of_event(growth: Mapping[str, Any] | None) -> OomTrend | None:
    if growth is None or growth.get("where", "allocated") != "allocated":
        return None
    per_step: Any = growth.get("bytes_per_step")
    steps: Any = growth.get("steps")
    if type(per_step) not in (int, float) or type(steps) not in (int, float):
        return None
    if not (0 < per_step < LARGEST and 0 < steps < LARGEST):
        return None
    return OomTrend(per_step, int(steps), int(per_step * int(steps)))


def _slopes(points: list[tuple[int, float]]) -> Floats:
    """Return the slopes of all pairs of points, in bytes per step."""
    steps, values = np.array(points, float).reshape(-1, 2).T
    first, second = np.triu_indices(len(points), 1)
    slopes: Floats = (values[second] - values[first]) / (steps[second] - steps[first])
    return slopes


def _at_boundaries(record: OomRecord) -> list[tuple[int, float]]:
    """Return (step, allocated bytes) at the end of the last steps.

    A reading inside a long step includes that step's tensors: the lowest of a step counts.
    """
    lowest: dict[int, float] = {}
    first = record.step - (record.steps_done or 0)  # not 0 for a resumed run
    for step, value in _column(record, "memory/allocated"):
        if step > FIRST_STEPS + first:
            lowest[step] = min(value, lowest.get(step, value))
    return sorted(lowest.items())


def usual_peak(record: OomRecord) -> int | None:
    """Return the peak of the steps that ended; None without a reading.

    The peak that is read after step n may include the step under way, so only readings before the
    last boundary count.
    """
    if record.steps_done is None or record.steps_done < FIRST_STEPS:
        return None
    readings = _column(record, "memory/peak_allocated")
    peaks = [value for step, value in readings if step < record.step]
    return int(max(peaks)) if peaks else None


def _column(record: OomRecord, key: str) -> list[tuple[int, float]]:
    values = record.readings.columns.get(key, ())
    pairs = zip(record.readings.steps, values, strict=False)
    return [(step, value) for step, value in pairs if value is not None]


@dataclass(frozen=True, slots=True, kw_only=True)
class OomFigures:
    """The figures of a record that a verdict needs; bytes.

    `limit` is what this process may use of the device, `room` what the driver could still give it,
    `outside` what is used outside torch's memory of this process.
    """

    requested: int
    limit: int
    room: int
    allocated: int
    reserved: int
    outside: int

    @property
    def cached(self) -> int:
        """Reserved and not allocated, in pieces."""
        return self.reserved - self.allocated

    @property
    def demand(self) -> int:
        """Allocated and requested."""
        return self.allocated + self.requested


def figures_of(record: OomRecord) -> OomFigures | None:
    """Return the figures of a record; None if one is missing, or they contradict each other."""
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


def others_of(record: OomRecord, figures: OomFigures) -> int | None:
    """Return the memory of other processes; None if it cannot be separated from our own."""
    if record.others is not None:
        return max(record.others, 0)
    listed = [one.memory for one in record.processes if one.memory is not None]
    if listed:
        return sum(listed)
    if record.own is not None and record.total is not None and record.free is not None:
        return max(0, record.total - record.free - max(record.own, figures.reserved))
    return None


def evidence_of(
    record: OomRecord, figures: OomFigures | None = None, found: OomTrend | None = None
) -> dict[str, str]:
    """Return the figures that a verdict is based on, by their label."""
    segments, state, host = record.segments, record.optimizer, record.host or HostMemory()
    sizes = {
        "Requested": record.requested,
        "Allocated (tensors)": record.allocated,
        "Reserved but free (fragmented)": None if figures is None else figures.cached,
        "Largest free block": getattr(segments, "largest_free", None),
        "Largest free block in other streams and pools": getattr(segments, "elsewhere", None),
        "Free on the device": record.free,
        "Other processes": None if figures is None else others_of(record, figures),
        "Outside of PyTorch's memory": None if figures is None else figures.outside,
        "Limit of this process": record.allowed,
        "Device total": record.total,
        "Peak of earlier steps": usual_peak(record),
        "Parameters": getattr(state, "parameters", None),
        "Optimizer state, so far": getattr(state, "state", None),
        "Optimizer state, complete": getattr(state, "expected", None),
        "Host, available": host.available,
        "Host in all": host.total,
        "This process": host.process,
        "Its child processes": host.children,
        "Container, used": host.limit_used,
        "Container, limit": host.limit,
        "Shared memory, free": host.shared_free,
    }
    shown = {name: format_bytes(size) for name, size in sizes.items() if size is not None}
    reason = record.others_reason if record.others is None else None
    grown = found and f"{format_bytes(found.per_step)} a step over {found.steps:,} steps"
    texts = {
        "Other processes": reason and f"not known: {reason}",
        "Growth of allocated": grown,
        "Processes ended by the kernel": None if host.kills is None else f"{host.kills:,}",
        "Phase": record.phase,
        "Model mode": {True: "training", False: "evaluation", None: None}[record.training],
        "Gradients": {True: "on", False: "off", None: None}[record.grad],
        "Model inputs": ", ".join(record.inputs),
        "Steps completed": None if record.steps_done is None else f"{record.steps_done:,}",
        "Allocator settings": record.settings.text,
        "Retries before": f"{record.retries:,}" if record.retries else None,
    }
    return shown | {name: text for name, text in texts.items() if text and name not in shown}
