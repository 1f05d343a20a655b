"""Summarize a snapshot for a page: largest allocations, modules, what changed."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Any

from stepscope.common.formatting import printable
from stepscope.memory.snapshots.load import REMEDY, MemorySnapshot, SnapshotError
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
from stepscope.memory.snapshots.timeline import MemoryTimeline, history
from stepscope.memory.snapshots.trace import OOMS_LIMIT

SITES_LIMIT = 2000
"""Stacks with live memory that are listed one by one; programs have some hundred."""
SETTINGS_LIMIT = 40
TEXT_LIMIT = 200
SUM_LIMIT = 2**63  # Bytes: a foreign file may give each of many blocks a size near this.


@dataclass(frozen=True, slots=True)
class AllocationSite:
    """Live memory of one stack on one device at the end; `size` as taken, `requested` as asked."""

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
    """A snapshot in short. `stacks` are lists of places in `texts`, innermost frame first."""

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
    settings: dict[str, str]
    texts: tuple[str, ...]
    stacks: tuple[tuple[int, ...], ...]
    modules: tuple[str | None, ...]  # Of each stack the module that it names.
    unreadable: int  # Entries of the history that were no actions.
    stacks_left: int  # Allocations whose stack was one too many to be kept.

    def frames(self, stack: int) -> tuple[str, ...]:
        """Return the lines of a stack, () where none was recorded."""
        if stack == NO_STACK:
            return ()
        return tuple(self.texts[place] for place in self.stacks[stack])

    def module(self, stack: int) -> str | None:
        """Return the module that a stack names, if any."""
        return None if stack == NO_STACK else self.modules[stack]


def summarize(snapshot: MemorySnapshot) -> SnapshotSummary:
    """Return the summary of a snapshot. Raises SnapshotError for sizes of 2**63 bytes or more."""
    name = printable(snapshot.name)[:TEXT_LIMIT]
    try:
        summary = _summarized(name, snapshot)
    except OverflowError:
        summary = None
    if summary is not None:
        sizes = [one.parts.reserved for one in summary.devices]
        sizes += [one.parts.reserved for one in summary.places]
        sizes += [one.peak for one in summary.histories]
        sizes += [value for site in summary.sites for value in (site.size, site.requested)]
        if max((*sizes, summary.size_left)) < SUM_LIMIT:
            return summary
    raise SnapshotError(
        f"{name}: its sizes must add up to less than 2**63 bytes, got more. {REMEDY}"
    )


def _summarized(name: str, snapshot: MemorySnapshot) -> SnapshotSummary:
    devices = device_memory(snapshot.segments, snapshot.stacks)
    sites = _sites(snapshot.segments, snapshot.stacks)
    failed = [
        FailedAllocation(device, oom.requested, oom.device_free)
        for device, trace in snapshot.traces.items()
        for oom in trace.ooms
    ]
    listed = sites[:SITES_LIMIT]
    kept = _KeptStacks(snapshot.stacks)
    return SnapshotSummary(
        name=name,
        file_size=snapshot.size,
        devices=tuple(kept.device(device) for device in devices),
        places=places(snapshot.segments),
        sites=tuple(replace(site, stack=kept.number(site.stack)) for site in listed),
        sites_left=len(sites) - len(listed),
        size_left=sum(site.size for site in sites[SITES_LIMIT:]),
        histories=tuple(kept.history(one) for one in _histories(snapshot, devices)),
        failed=tuple(failed[:OOMS_LIMIT]),
        labels=snapshot.labels,
        settings=_settings(snapshot.settings),
        unreadable=sum(trace.unreadable for trace in snapshot.traces.values()),
        stacks_left=snapshot.stacks.left_out,
        **kept.tables(),
    )


def _sites(segments: list[Any], stacks: StackTable) -> list[AllocationSite]:
    """Return what each stack holds at the end, the largest first."""
    sums: defaultdict[tuple[int, int], list[int]] = defaultdict(lambda: [0, 0, 0])
    for segment in segments_of(segments):
        device = whole(segment.get("device")) or 0
        for block in blocks_of(segment):
            if block.state == ACTIVE:
                found = sums[device, stacks.number(block.frames)]
                found[0] += block.size
                found[1] += block.requested
                found[2] += 1
    sites = [AllocationSite(*key, *numbers) for key, numbers in sums.items()]
    return sorted(sites, key=lambda site: (-site.size, site.device, site.stack))


def _histories(
    snapshot: MemorySnapshot, devices: Iterable[DeviceSegments]
) -> Iterator[MemoryTimeline]:
    reserved = {one.device: one.parts.reserved for one in devices}
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
        found = history(device, trace, live[device], reserved.get(device))
        if found is not None:
            yield found


def _settings(settings: dict[str, Any]) -> dict[str, str]:
    return {
        printable(name)[:TEXT_LIMIT]: printable(str(value))[:TEXT_LIMIT]
        for name, value in list(settings.items())[:SETTINGS_LIMIT]
        # Python refuses to convert a very large integer to text.
        if isinstance(name, str)
        and (isinstance(value, str | float) or (isinstance(value, int) and abs(value) < 2**63))
    }


class _KeptStacks:
    """Renumbers the stacks that a summary refers to; all others are left out."""

    def __init__(self, stacks: StackTable) -> None:
        self._stacks = stacks
        self._numbers = {NO_STACK: NO_STACK}

    def number(self, stack: int) -> int:
        """Return the new number of a stack."""
        return self._numbers.setdefault(stack, len(self._numbers) - 1)

    def device(self, memory: DeviceSegments) -> DeviceSegments:
        """Return it with new numbers."""
        rows = (
            replace(row, parts=tuple(replace(p, stack=self.number(p.stack)) for p in row.parts))
            for row in memory.rows
        )
        return replace(memory, rows=tuple(rows))

    def history(self, one: MemoryTimeline) -> MemoryTimeline:
        """Return it with new numbers."""
        bands = tuple(replace(band, stack=self.number(band.stack)) for band in one.bands)
        held = tuple(replace(held, stack=self.number(held.stack)) for held in one.at_peak)
        return replace(one, bands=bands, at_peak=held)

    def tables(self) -> dict[str, Any]:
        """Return the texts, stacks and modules of the new numbers."""
        found: dict[int, int] = {}
        kept = [stack for stack in self._numbers if stack != NO_STACK]
        stacks = [
            tuple(found.setdefault(text, len(found)) for text in self._stacks.frames[stack])
            for stack in kept
        ]
        return {
            "texts": tuple(self._stacks.texts[text] for text in found),
            "stacks": tuple(stacks),
            "modules": tuple(module_of(self._stacks.text(stack)) for stack in kept),
        }


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
        """Bytes that came, negative for bytes that went."""
        return self.after - self.before


@dataclass(frozen=True, slots=True)
class SnapshotDiff:
    """The changes from one snapshot to another, the largest first, all devices together."""

    changes: tuple[StackDiff, ...]
    before: int  # All live bytes.
    after: int
    complete: bool
    """False where one of both has more stacks than are listed: theirs are not compared."""


def difference(first: SnapshotSummary, second: SnapshotSummary) -> SnapshotDiff:
    """Return what is live in the second and not in the first, and the reverse.

    Blocks are compared by the stack that allocated them: addresses mean nothing across runs.
    """
    sums: dict[tuple[str, ...], list[int]] = {}
    modules: dict[tuple[str, ...], str | None] = {}
    for side, summary in enumerate((first, second)):
        for site in summary.sites:
            frames = summary.frames(site.stack)
            found = sums.setdefault(frames, [0, 0, 0, 0])
            found[side] += site.size
            found[2 + side] += site.count
            modules[frames] = summary.module(site.stack)
    changes = [StackDiff(frames, modules[frames], *found) for frames, found in sums.items()]
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
    """Live bytes of all stacks that name one module; None for those that name none."""

    module: str | None
    size: int
    count: int


def by_module(summary: SnapshotSummary, device: int | None = None) -> tuple[ModuleMemory, ...]:
    """Return the live bytes by module, the largest first; without a device of all together."""
    sums: defaultdict[str | None, list[int]] = defaultdict(lambda: [0, 0])
    for site in summary.sites:
        if device is not None and site.device != device:
            continue
        found = sums[summary.module(site.stack)]
        found[0] += site.size
        found[1] += site.count
    made = [ModuleMemory(module, *numbers) for module, numbers in sums.items()]
    return tuple(sorted(made, key=lambda one: (-one.size, one.module or "")))
