"""Compute the figures of a failed allocation, and the memory trend before it. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import combinations
from statistics import median
from typing import Any

from stepscope.common.formatting import format_bytes
from stepscope.memory.oom.record import OomRecord

ALLOCATED, PEAK = "memory/allocated", "memory/peak_allocated"
FIRST_STEPS = 2
"""Steps whose memory is no rule yet: the optimizer's state and the libraries' workspaces come."""
TREND_STEPS = 6
"""Different steps below which no trend is told."""
COMPARED = 60
"""Groups of steps that a trend compares with each other, at most."""
LARGEST = 1e15
"""Bytes or steps that nobody has."""
CONFIRMED = 0.5
"""Share of an event's rate at which the last steps still grow, at least: else it is over."""
RISES = 0.9
"""Share of the pairs of steps in which the later one has more: ups and downs are no trend."""


@dataclass(frozen=True, slots=True)
class AllocationTrend:
    """Allocated memory that grows: bytes a step, over how many steps that was seen, and by what.

    Nothing is said of steps that nobody has looked at.
    """

    per_step: float
    steps: int
    grown: int


def trend(record: OomRecord, growth: Mapping[str, Any] | None = None) -> AllocationTrend | None:
    """Return the growth of allocated memory, by the run's own event of it or by the last samples.

    `growth` is what that event says: `bytes_per_step` and `steps`, checked here. It may be old: it
    counts unless the last samples say otherwise.
    """
    points = at_boundaries(record)
    seen = _seen(points)
    told = _told(growth)
    if told is None or (seen is not None and seen.grown >= told.grown):
        return seen
    goes_on = len(points) < 2 or _slope(_lowest(points)) >= CONFIRMED * told.per_step
    return told if goes_on else seen


def _told(growth: Mapping[str, Any] | None) -> AllocationTrend | None:
    """Return what an event says of the steps that it is about."""
    if growth is None or growth.get("where", "allocated") != "allocated":
        return None
    per_step, steps = _number(growth.get("bytes_per_step")), _number(growth.get("steps"))
    if not (0 < per_step < LARGEST and 0 < steps < LARGEST):
        return None
    return AllocationTrend(per_step, int(steps), int(per_step * int(steps)))


def _seen(points: list[tuple[int, float]]) -> AllocationTrend | None:
    """Return the growth within the last samples, no more than from the first to the last one."""
    if len(points) < TREND_STEPS:
        return None
    lowest = _lowest(points)
    pairs = list(combinations(lowest, 2))
    rising = sum(later[1] > earlier[1] for earlier, later in pairs)
    slope = _slope(lowest)
    if rising < RISES * len(pairs) or slope <= 0:
        return None
    steps = points[-1][0] - points[0][0]
    grown = min(slope * steps, points[-1][1] - points[0][1])
    return AllocationTrend(slope, steps, int(grown)) if grown > 0 else None


def _lowest(points: list[tuple[int, float]]) -> list[tuple[int, float]]:
    every = max(1, -(-len(points) // COMPARED))
    groups = [points[start : start + every] for start in range(0, len(points), every)]
    # The lowest of each: every third point of what goes up every third step would mislead.
    return [min(group, key=lambda point: point[1]) for group in groups]


def _slope(points: list[tuple[int, float]]) -> float:
    """Return the median slope of all pairs, 0 where there is none; bytes a step."""
    pairs = combinations(points, 2)
    slopes = [(later[1] - earlier[1]) / (later[0] - earlier[0]) for earlier, later in pairs]
    return median(slopes) if slopes else 0.0


def at_boundaries(record: OomRecord) -> list[tuple[int, float]]:
    """Return (step, allocated bytes) of the last steps, as it was when each had ended.

    A reading inside a long step has that step's tensors too: the lowest of a step counts.
    """
    lowest: dict[int, float] = {}
    for step, value in _column(record, ALLOCATED):
        if step > FIRST_STEPS + _first_step(record):
            lowest[step] = min(value, lowest.get(step, value))
    return sorted(lowest.items())


def usual_peak(record: OomRecord) -> int | None:
    """Return the most that was allocated in steps that ended; None where no reading tells.

    The peak that is read after step n may hold what the step under way has taken so far, so only
    readings from before the last boundary count.
    """
    done = record.steps_done
    if done is None or done < FIRST_STEPS:
        return None
    peaks = [value for step, value in _column(record, PEAK) if step < record.step]
    return int(max(peaks)) if peaks else None


def _first_step(record: OomRecord) -> int:
    """Return the step after which this run began: not 0 for a resumed one."""
    return record.step - (record.steps_done or 0)


def _column(record: OomRecord, key: str) -> list[tuple[int, float]]:
    values = record.readings.columns.get(key, ())
    pairs = zip(record.readings.steps, values, strict=False)
    return [(step, value) for step, value in pairs if value is not None]


def _number(value: Any) -> float:
    """Return a number of an event's data, 0 for what is none."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return 0.0
    return float(value) if -LARGEST < value < LARGEST else 0.0


OUTSIDE = 0.25
"""Share of the device held outside torch, by nobody knows whom, from which no case is named: a
context and its libraries take less."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OomEvidence:
    """A figure that the verdict rests on: bytes, or a text where it is none."""

    name: str
    size: float | None = None
    text: str | None = None

    @property
    def shown(self) -> str:
        """The value as people read it."""
        return self.text if self.text is not None else format_bytes(self.size)


@dataclass(frozen=True, slots=True, kw_only=True)
class OomMemoryStats:
    """The figures of a record that all have to be there for a judgement; bytes.

    `limit` is what this process may use of the device, `room` what the driver could still give it,
    `cached` what torch keeps in pieces, `outside` what is used and is not torch's of this process.
    """

    requested: int
    limit: int
    room: int
    allocated: int
    reserved: int
    outside: int

    @property
    def cached(self) -> int:
        """Reserved and not allocated."""
        return max(0, self.reserved - self.allocated)

    @property
    def demand(self) -> int:
        """What would have been allocated."""
        return self.allocated + self.requested


def figures_of(record: OomRecord) -> OomMemoryStats | None:
    """Return the figures of a record; None where one is missing, or they contradict each other."""
    needed = (record.requested, record.free, record.allocated, record.reserved)
    limit = record.allowed or record.total
    if limit is None or limit <= 0 or any(part is None or part < 0 for part in needed):
        return None
    requested, free, allocated, reserved = (int(part or 0) for part in needed)
    if requested == 0 or allocated > reserved:
        return None
    total = record.total or limit
    room = free if limit >= total else min(free, max(0, limit - reserved))
    outside = max(0, total - free - reserved)
    return OomMemoryStats(
        requested=requested,
        limit=limit,
        room=room,
        allocated=allocated,
        reserved=reserved,
        outside=outside,
    )


def others_of(record: OomRecord, figures: OomMemoryStats) -> int | None:
    """Return the memory of other processes; None where nobody tells it from our own."""
    listed = [one.memory for one in record.processes if one.memory is not None]
    if record.others is not None:
        return max(record.others, 0)
    if listed:
        return sum(listed)
    if record.own is not None and record.total is not None and record.free is not None:
        return max(0, record.total - record.free - max(record.own, figures.reserved))
    return None


def evaluates_with_gradients(record: OomRecord) -> bool:
    """Say whether a validation ran with gradients on, as without `torch.no_grad()`.

    Evaluation mode alone does not tell: it has to be another mode than steps ended in.
    """
    changed = record.training is False and record.training_at_steps is True
    return record.grad is True and record.phase == "validation" and changed


def gpu_evidence(
    record: OomRecord, figures: OomMemoryStats | None, found: AllocationTrend | None
) -> tuple[OomEvidence, ...]:
    usual = usual_peak(record)
    segments, state = record.segments, record.optimizer
    sizes = [
        ("Requested", record.requested),
        ("Allocated (tensors)", record.allocated),
        ("Reserved but free (fragmented)", None if figures is None else figures.cached),
        ("Largest free block", None if segments is None else segments.largest_free),
        ("Largest free block in other streams and pools", segments.elsewhere if segments else None),
        ("Free on the device", record.free),
        ("Other processes", None if figures is None else others_of(record, figures)),
        ("Outside of PyTorch's memory", None if figures is None else figures.outside),
        ("Limit of this process", record.allowed),
        ("Device total", record.total),
        ("Peak of earlier steps", usual),
        ("Parameters", None if state is None else state.parameters),
        ("Optimizer state, so far", None if state is None else state.state),
        ("Optimizer state, complete", None if state is None else state.expected),
    ]
    told = [OomEvidence(name=name, size=size) for name, size in sizes if size is not None]
    if record.others is None and record.others_reason:
        told.append(OomEvidence(name="Other processes", text=f"not known: {record.others_reason}"))
    if found is not None:
        grown = f"{format_bytes(found.per_step)} a step over {found.steps:,} steps"
        told.append(OomEvidence(name="Growth of allocated", text=grown))
    return (*told, *_circumstances(record))


def _circumstances(record: OomRecord) -> tuple[OomEvidence, ...]:
    modes = {True: "training", False: "evaluation", None: None}
    grads = {True: "on", False: "off", None: None}
    words = [
        ("Phase", record.phase),
        ("Model mode", modes[record.training]),
        ("Gradients", grads[record.grad]),
        ("Model inputs", ", ".join(record.inputs) or None),
        ("Steps completed", None if record.steps_done is None else f"{record.steps_done:,}"),
        ("Allocator settings", record.settings.text or None),
        ("Retries before", None if not record.retries else f"{record.retries:,}"),
    ]
    return tuple(OomEvidence(name=name, text=text) for name, text in words if text is not None)


def host_evidence(record: OomRecord) -> tuple[OomEvidence, ...]:
    host = record.host
    sizes = [("Requested", record.requested)]
    if host is not None:
        sizes += [
            ("Host, available", host.available),
            ("Host in all", host.total),
            ("This process", host.process),
            ("Its child processes", host.children),
            ("Container, used", host.limit_used),
            ("Container, limit", host.limit),
            ("Shared memory, free", host.shared_free),
        ]
    told = [OomEvidence(name=name, size=size) for name, size in sizes if size is not None]
    if host is not None and host.kills is not None:
        told.append(OomEvidence(name="Processes ended by the kernel", text=f"{host.kills:,}"))
    return (*told, *_circumstances(record))
