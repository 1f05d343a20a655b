"""The peak of a list of allocations, and what it consists of."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from trainer.memory_estimate.allocation_tracker import Event, Part
from trainer.memory_estimate.allocator import Block, CachingAllocator

EMPTY_CACHE = -1
"""Number of the event at which the allocator gives free segments back."""
WAITING = "waiting"
"""Pool of memory that is freed and still reserved, as a copied batch is for some steps."""
ROUNDING = "rounding"


@dataclass(frozen=True, slots=True)
class Peak:
    """Bytes at the moment when most were allocated; `reserved` is its own peak, None on a CPU."""

    allocated: int
    parts: dict[str, int] = field(default_factory=dict)
    reserved: int | None = None


def host_peak(events: Iterable[Event], parts: Mapping[int, Part]) -> Peak:
    """Return the peak of memory that is taken from and given back to the system at once."""
    now: Counter[str] = Counter()
    total = most = 0
    at_most: dict[str, int] = {}
    for event in events:
        if event.number == EMPTY_CACHE or event.pool == WAITING:
            continue  # there is no cache on the host
        now[parts[event.number]] += event.size
        total += event.size
        if total > most:
            most, at_most = total, dict(now)
    return Peak(most, _by_part(at_most))


def device_peak(events: Iterable[Event], parts: Mapping[int, Part]) -> Peak:
    """Return the peak of torch's caching allocator, with what it rounds up as a part of its own."""
    allocator, blocks = CachingAllocator(), dict[int, Block]()
    now: Counter[str] = Counter()
    most = waiting = reserved = 0
    at_most: dict[str, int] = {}
    for event in events:
        if event.number == EMPTY_CACHE:
            allocator.empty_cache()
        elif event.size < 0:
            block = blocks.pop(event.number)
            allocator.release(block)
            if event.pool == WAITING:
                waiting -= block.size
            else:
                now[parts[event.number]] += event.size
        elif event.size:
            block = blocks[event.number] = allocator.allocate(event.size, event.pool)
            if event.pool == WAITING:
                waiting += block.size
            else:
                now[parts[event.number]] += event.size
        reserved = max(reserved, allocator.reserved)
        if allocator.allocated - waiting > most:
            most, at_most = allocator.allocated - waiting, dict(now)
    found = _by_part(at_most)
    return Peak(most, {**found, ROUNDING: most - sum(found.values())}, reserved)


def _by_part(found: Mapping[str, int]) -> dict[str, int]:
    return {part.value: found.get(part, 0) for part in Part}
