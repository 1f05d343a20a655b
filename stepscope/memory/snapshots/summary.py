"""Summarize a snapshot for a page: largest allocations, modules, what changed."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any

from stepscope.common.formatting import printable
from stepscope.memory.snapshots.load import REMEDY, MemorySnapshot, SnapshotError
from stepscope.memory.snapshots.segments import (
    DeviceSegments,
    SegmentSlice,
    StreamPoolUsage,
    blocks_of,
    device_memory,
    places,
    segments_of,
    whole,
)
from stepscope.memory.snapshots.stacks import NO_STACK, StackTable, module_of
from stepscope.memory.snapshots.timeline import MemoryTimeline, StackBand, StackUsage, history
from stepscope.memory.snapshots.trace import OOMS_LIMIT

SITES_LIMIT = 2000
"""Stacks with live memory that are listed one by one; programs have some hundred."""
SETTINGS_LIMIT = 40
TEXT_LIMIT = 200
SUM_LIMIT = 2**63
"""Bytes: a foreign file may give each of many blocks a size near this."""


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
class Setting:
    """One of the allocator's settings as torch names it."""

    name: str
    value: str


@dataclass(frozen=True, slots=True)
class SnapshotSummary:
    """A snapshot in short. `stacks` are lists of places in `texts`, innermost frame first."""

    name: str
    file_size: int
    devices: tuple[DeviceSegments, ...]
    places: tuple[StreamPoolUsage, ...]
    sites: tuple[AllocationSite, ...]
    """Live at the end, the largest first."""
    sites_left: int
    """Further sites, whose memory is in `size_left`."""
    size_left: int
    histories: tuple[MemoryTimeline, ...]
    failed: tuple[FailedAllocation, ...]
    labels: tuple[str, ...]
    settings: tuple[Setting, ...]
    texts: tuple[str, ...]
    stacks: tuple[tuple[int, ...], ...]
    modules: tuple[str | None, ...]
    """Of each stack the module that it names."""
    unreadable: int
    """Entries of the history that were no actions."""
    stacks_left: int
    """Allocations whose stack was one too many to be kept."""

    def frames(self, stack: int) -> tuple[str, ...]:
        """Return the lines of a stack, () where none was recorded."""
        if stack == NO_STACK:
            return ()
        return tuple(self.texts[place] for place in self.stacks[stack])

    def module(self, stack: int) -> str | None:
        """Return the module that a stack names, if any."""
        return None if stack == NO_STACK else self.modules[stack]


def summarize(snapshot: MemorySnapshot) -> SnapshotSummary:
    """Return a snapshot in short. Raises SnapshotError where its sizes add up to no real memory."""
    try:
        summary = _summarized(snapshot)
    except OverflowError as error:
        raise SnapshotError(_too_much(snapshot.name)) from error
    reserved = [one.parts.reserved for one in summary.devices]
    reserved += [one.parts.reserved for one in summary.places]
    peaks = [one.peak for one in summary.histories]
    sizes = [value for site in summary.sites for value in (site.size, site.requested)]
    if max((*reserved, *peaks, *sizes, summary.size_left), default=0) >= SUM_LIMIT:
        raise SnapshotError(_too_much(snapshot.name))
    return summary


def _too_much(name: str) -> str:
    return (
        f"{printable(name)[:TEXT_LIMIT]}: its sizes must add up to less than 2**63 bytes, got "
        f"more. {REMEDY}"
    )


def _summarized(snapshot: MemorySnapshot) -> SnapshotSummary:
    devices = device_memory(snapshot.segments, snapshot.stacks)
    sites = _sites(snapshot.segments, snapshot.stacks)
    histories = _histories(snapshot, devices)
    failed = [
        FailedAllocation(device, oom.requested, oom.device_free)
        for device, trace in snapshot.traces.items()
        for oom in trace.ooms
    ]
    listed = sites[:SITES_LIMIT]
    kept = _Kept(snapshot.stacks)
    return SnapshotSummary(
        name=printable(snapshot.name)[:TEXT_LIMIT],
        file_size=snapshot.size,
        devices=tuple(kept.device(device) for device in devices),
        places=places(snapshot.segments),
        sites=tuple(replace(site, stack=kept.number(site.stack)) for site in listed),
        sites_left=len(sites) - len(listed),
        size_left=sum(site.size for site in sites[SITES_LIMIT:]),
        histories=tuple(kept.history(one) for one in histories),
        failed=tuple(failed[:OOMS_LIMIT]),
        labels=tuple(snapshot.labels.names),
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
            if block.allocated:
                found = sums[device, stacks.number(block.frames)]
                found[0] += block.size
                found[1] += block.requested
                found[2] += 1
    sites = [AllocationSite(*key, *numbers) for key, numbers in sums.items()]
    return sorted(sites, key=lambda site: (-site.size, site.device, site.stack))


def _histories(snapshot: MemorySnapshot, devices: Iterable[DeviceSegments]) -> list[MemoryTimeline]:
    reserved = {one.device: one.parts.reserved for one in devices}
    live: defaultdict[int, dict[int, int]] = defaultdict(dict)
    for segment in segments_of(snapshot.segments):
        begin = whole(segment.get("address"))
        for block in blocks_of(segment):
            place = (
                block.address
                if block.address is not None or begin is None
                else (begin + block.start)
            )
            if block.allocated and place is not None:
                live[whole(segment.get("device")) or 0][place] = block.requested
    made = (
        history(device, trace, live[device], reserved.get(device))
        for device, trace in snapshot.traces.items()
    )
    return [one for one in made if one is not None]


def _settings(settings: dict[str, Any]) -> tuple[Setting, ...]:
    return tuple(
        Setting(printable(str(name))[:TEXT_LIMIT], printable(str(value))[:TEXT_LIMIT])
        for name, value in list(settings.items())[:SETTINGS_LIMIT]
        if isinstance(name, str) and _is_plain(value)
    )


def _is_plain(value: object) -> bool:
    """Say whether a value has a short text; that of a huge whole number Python refuses."""
    return isinstance(value, str | float) or (isinstance(value, int) and abs(value) < 2**63)


class _Kept:
    """Gives the stacks that a summary speaks of new numbers, and leaves out all others."""

    def __init__(self, stacks: StackTable) -> None:
        self._stacks = stacks
        self._numbers: dict[int, int] = {}

    def number(self, stack: int) -> int:
        """Return the new number of a stack."""
        return (
            NO_STACK if stack == NO_STACK else self._numbers.setdefault(stack, len(self._numbers))
        )

    def device(self, memory: DeviceSegments) -> DeviceSegments:
        """Return it with new numbers."""
        rows = (
            replace(
                row,
                parts=tuple(SegmentSlice(p.size, p.state, self.number(p.stack)) for p in row.parts),
            )
            for row in memory.rows
        )
        return replace(memory, rows=tuple(rows))

    def history(self, one: MemoryTimeline) -> MemoryTimeline:
        """Return it with new numbers."""
        bands = (StackBand(self.number(band.stack), band.peak, band.live) for band in one.bands)
        held = (StackUsage(self.number(held.stack), held.size, held.count) for held in one.at_peak)
        return replace(one, bands=tuple(bands), at_peak=tuple(held))

    def tables(self) -> dict[str, Any]:
        """Return the texts, stacks and modules behind the new numbers."""
        places: dict[int, int] = {}
        stacks, modules = [], []
        for stack in self._numbers:
            modules.append(module_of(self._stacks.text(stack)))
            stacks.append(
                tuple(places.setdefault(p, len(places)) for p in self._stacks.frames[stack])
            )
        return {
            "texts": tuple(self._stacks.texts[place] for place in places),
            "stacks": tuple(stacks),
            "modules": tuple(modules),
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
    before: int
    """All live bytes."""
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
