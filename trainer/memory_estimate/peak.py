"""The peak of a list of allocations, and its parts."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from trainer.memory_estimate.allocation_tracker import AllocationCategory, AllocationEvent
from trainer.memory_estimate.allocator import AllocatorBlock, CachingAllocator

EMPTY_CACHE = -1
"""Number of the event at which the allocator releases free segments."""
WAITING = "waiting"
"""Pool of memory that is freed and still reserved, as a copied batch is for some steps."""


@dataclass(frozen=True, slots=True)
class PeakMemory:
    """Bytes at the peak of allocated memory; `reserved` has its own peak, None on a CPU."""

    allocated: int
    parts: dict[str, int] = field(default_factory=dict)
    reserved: int | None = None


def host_peak(
    events: Iterable[AllocationEvent], parts: Mapping[int, AllocationCategory]
) -> PeakMemory:
    """Return the peak without an allocator's cache."""
    now: Counter[str] = Counter()
    total = most = 0
    at_most: Mapping[str, int] = {}
    for event in events:
        if event.number == EMPTY_CACHE or event.pool == WAITING:
            continue
        now[parts[event.number]] += event.size
        total += event.size
        if total > most:
            most, at_most = total, now.copy()
    return PeakMemory(most, {part.value: at_most.get(part, 0) for part in AllocationCategory})


def device_peak(
    events: Iterable[AllocationEvent], parts: Mapping[int, AllocationCategory]
) -> PeakMemory:
    """Return the peak of torch's caching allocator, with its rounding as one part."""
    allocator, blocks = CachingAllocator(), dict[int, AllocatorBlock]()
    now: Counter[str] = Counter()
    most = waiting = reserved = 0
    at_most: Mapping[str, int] = {}
    for event in events:
        before = allocator.allocated
        if event.number == EMPTY_CACHE:
            allocator.empty_cache()
        elif event.size < 0:
            allocator.release(blocks.pop(event.number))
        elif event.size:
            blocks[event.number] = allocator.allocate(event.size, event.pool)
        if event.pool == WAITING:
            waiting += allocator.allocated - before
        elif event.size:
            now[parts[event.number]] += event.size
        reserved = max(reserved, allocator.reserved)
        if allocator.allocated - waiting > most:
            most, at_most = allocator.allocated - waiting, now.copy()
    found = {part.value: at_most.get(part, 0) for part in AllocationCategory}
    return PeakMemory(most, {**found, "rounding": most - sum(found.values())}, reserved)
