"""Summarize a snapshot for a page: largest allocation sites, modules, differences; no I/O."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from stepscope.common.formatting import printable
from stepscope.memory.snapshots.load import MemorySnapshot
from stepscope.memory.snapshots.segments import (
    ACTIVE,
    DeviceSegments,
    PoolMemory,
    blocks_of,
    device_memory,
    places,
    segments_of,
    whole,
)
from stepscope.memory.snapshots.stacks import NO_STACK, StackTable, module_of
from stepscope.memory.snapshots.timeline import MAX_OOMS, MemoryTimeline, history

MAX_SITES = 2000  # Stacks with live memory that are listed; programs have some hundred.
MAX_TEXT_CHARS = 200


@dataclass(frozen=True, slots=True)
class AllocationSite:
    """Live memory of one stack on one device at the end: allocated and requested bytes."""

    device: int
    stack: int
    size: int
    requested: int
    count: int


@dataclass(frozen=True, slots=True)
class FailedAllocation:
    """An allocation that failed while the history was recorded, in bytes."""

    device: int
    requested: int
    device_free: int | None


@dataclass(frozen=True, slots=True)
class SnapshotSummary:
    """The summary of a snapshot; frames of a stack are keys of `texts`, innermost first."""

    name: str
    file_size: int
    devices: tuple[DeviceSegments, ...]
    places: tuple[PoolMemory, ...]
    sites: tuple[AllocationSite, ...]  # Live at the end, the largest first.
    sites_left: int  # Further sites, whose memory is in `size_left`.
    size_left: int
    histories: tuple[MemoryTimeline, ...]
    failed: tuple[FailedAllocation, ...]
    labels: tuple[str, ...]
    texts: dict[int, str]
    stacks: dict[int, tuple[int, ...]]

    def frames(self, stack: int) -> tuple[str, ...]:
        """Return the lines of a stack, () if none was recorded."""
        return tuple(self.texts[place] for place in self.stacks.get(stack, ()))

    def module(self, stack: int) -> str | None:
        """Return the module of a stack; None without one."""
        return module_of(self.frames(stack))


def summarize(snapshot: MemorySnapshot) -> SnapshotSummary:
    """Return the summary of a snapshot. Raises OverflowError for sizes above 64 bits."""
    table = snapshot.stacks
    devices = device_memory(snapshot.segments, table)
    sites = _sites(snapshot.segments, table)
    histories = tuple(_histories(snapshot, devices))
    failed = [
        FailedAllocation(device, oom.requested, oom.device_free)
        for device, trace in snapshot.traces.items()
        for oom in trace.ooms
    ]
    used = [part.stack for memory in devices for row in memory.rows for part in row.parts]
    used += [site.stack for site in sites[:MAX_SITES]]
    for timeline in histories:
        used += [band.stack for band in timeline.bands]
        used += [held.stack for held in timeline.at_peak]
    stacks = {number: table.frames[number] for number in sorted(set(used) - {NO_STACK})}
    texts = {text: table.texts[text] for frames in stacks.values() for text in frames}
    return SnapshotSummary(
        name=printable(snapshot.name)[:MAX_TEXT_CHARS],
        file_size=snapshot.size,
        devices=devices,
        places=places(snapshot.segments),
        sites=tuple(sites[:MAX_SITES]),
        sites_left=len(sites[MAX_SITES:]),
        size_left=sum(site.size for site in sites[MAX_SITES:]),
        histories=histories,
        failed=tuple(failed[:MAX_OOMS]),
        labels=snapshot.labels,
        texts=texts,
        stacks=stacks,
    )


def _sites(segments: list[Any], stacks: StackTable) -> list[AllocationSite]:
    sums: defaultdict[tuple[int, int], list[int]] = defaultdict(lambda: [0, 0, 0])
    for segment in segments_of(segments):
        device = whole(segment.get("device")) or 0
        for block in blocks_of(segment):
            if block.state == ACTIVE:
                total = sums[device, stacks.number(block.frames)]
                total[0] += block.size
                total[1] += block.requested
                total[2] += 1
    sites = [AllocationSite(*key, *numbers) for key, numbers in sums.items()]
    return sorted(sites, key=lambda site: (-site.size, site.device, site.stack))


def _histories(
    snapshot: MemorySnapshot, devices: Iterable[DeviceSegments]
) -> Iterator[MemoryTimeline]:
    reserved = {memory.device: memory.parts.reserved for memory in devices}
    live: defaultdict[int, dict[int, int]] = defaultdict(dict)
    for segment in segments_of(snapshot.segments):
        device, begin = whole(segment.get("device")) or 0, whole(segment.get("address"))
        for block in blocks_of(segment):
            address = block.address
            if address is None and begin is not None:
                address = begin + block.start
            if block.state == ACTIVE and address is not None:
                live[device][address] = block.requested
    for device, trace in snapshot.traces.items():
        timeline = history(device, trace, live[device], reserved.get(device))
        if timeline is not None:
            yield timeline


@dataclass(frozen=True, slots=True)
class StackDiff:
    """Live bytes and blocks of one stack in both snapshots."""

    frames: tuple[str, ...]
    module: str | None
    before: int
    after: int
    count_before: int
    count_after: int

    @property
    def more(self) -> int:
        """Change of the live bytes, negative for freed bytes."""
        return self.after - self.before


@dataclass(frozen=True, slots=True)
class SnapshotDiff:
    """The changes from one snapshot to another, the largest first, all devices together."""

    changes: tuple[StackDiff, ...]
    before: int  # All live bytes.
    after: int
    complete: bool  # False if one of both has more stacks than are listed and compared.


def difference(first: SnapshotSummary, second: SnapshotSummary) -> SnapshotDiff:
    """Return the changes of live memory by the allocating stack: addresses differ across runs."""
    sums: defaultdict[tuple[str, ...], list[int]] = defaultdict(lambda: [0, 0, 0, 0])
    for side, summary in enumerate((first, second)):
        for site in summary.sites:
            total = sums[summary.frames(site.stack)]
            total[side] += site.size
            total[2 + side] += site.count
    changes = (StackDiff(frames, module_of(frames), *total) for frames, total in sums.items())
    changed = [one for one in changes if one.more or one.count_before != one.count_after]
    return SnapshotDiff(
        tuple(sorted(changed, key=lambda one: (-abs(one.more), one.frames))),
        live_bytes(first),
        live_bytes(second),
        complete=not first.sites_left and not second.sites_left,
    )


def live_bytes(summary: SnapshotSummary) -> int:
    """Return the bytes of all live blocks."""
    return sum(site.size for site in summary.sites) + summary.size_left


@dataclass(frozen=True, slots=True)
class ModuleMemory:
    """Live bytes of all stacks of one module; None for stacks without a module."""

    module: str | None
    size: int
    count: int


def by_module(summary: SnapshotSummary, device: int | None = None) -> tuple[ModuleMemory, ...]:
    """Return the live bytes by module, the largest first; without a device of all together."""
    sums: defaultdict[str | None, list[int]] = defaultdict(lambda: [0, 0])
    for site in summary.sites:
        if device is None or site.device == device:
            total = sums[summary.module(site.stack)]
            total[0] += site.size
            total[1] += site.count
    modules = [ModuleMemory(module, *numbers) for module, numbers in sums.items()]
    return tuple(sorted(modules, key=lambda one: (-one.size, one.module or "")))
