"""A model of torch's CUDA caching allocator: blocks and segments of a list of allocations.

The rules are those of c10/cuda/CUDACachingAllocator.cpp (torch 2.11 to 2.13) without
`expandable_segments`: sizes are rounded up to 512 B; up to 1 MiB comes from segments of 2 MiB, up
to 10 MiB from segments of 20 MiB, more from segments of its own size rounded up to 2 MiB. The
smallest free block of at least the size is used before a new segment, and split if the rest is
large enough. Segments stay reserved.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from trainer.memory_estimate.allocation_tracker import AllocationCategory, AllocationEvent

MIN_BLOCK = 512
SMALL_SIZE = 2**20
SMALL_SEGMENT = 2 * 2**20
LARGE_SEGMENT = 20 * 2**20
MIN_LARGE_ALLOCATION = 10 * 2**20
ROUND_LARGE = 2 * 2**20
EMPTY_CACHE = -1  # Number of the event at which the allocator releases free segments.
WAITING = "waiting"
"""Pool of memory that is freed and still reserved, such as a copied batch."""


def rounded(size: int) -> int:
    """Return the smallest size of a block for an allocation."""
    return max(MIN_BLOCK, -(-size // MIN_BLOCK) * MIN_BLOCK)


def segment_size(size: int) -> int:
    """Return the size of a new segment for a block of a rounded size."""
    if size <= SMALL_SIZE:
        return SMALL_SEGMENT
    if size < MIN_LARGE_ALLOCATION:
        return LARGE_SEGMENT
    return -(-size // ROUND_LARGE) * ROUND_LARGE


@dataclass(slots=True, eq=False)
class AllocatorBlock:
    """A part of a segment; `before` and `after` are its neighbors in it."""

    size: int
    address: int
    pool: tuple[str, bool]
    before: AllocatorBlock | None = None
    after: AllocatorBlock | None = None


@dataclass(slots=True)
class CachingAllocator:
    """Serves allocations; `allocated` and `reserved` are current bytes."""

    allocated: int = 0
    reserved: int = 0
    _free: dict[tuple[str, bool], set[AllocatorBlock]] = field(default_factory=dict)
    _address: int = 0

    def allocate(self, size: int, pool: str = "") -> AllocatorBlock:
        """Return a block, which may be larger than the allocation."""
        wanted = rounded(size)
        small = wanted <= SMALL_SIZE
        free = self._free.setdefault((pool, small), set())
        fitting = [block for block in free if block.size >= wanted]
        if fitting:
            block = min(fitting, key=lambda block: (block.size, block.address))
            free.remove(block)
        else:
            block = AllocatorBlock(segment_size(wanted), self._address, (pool, small))
            self.reserved += block.size
            self._address += block.size
        left = block.size - wanted
        if left >= MIN_BLOCK if small else left > SMALL_SIZE:
            rest = AllocatorBlock(left, block.address + wanted, block.pool, block, block.after)
            if block.after is not None:
                block.after.before = rest
            block.after, block.size = rest, wanted
            free.add(rest)
        self.allocated += block.size
        return block

    def release(self, block: AllocatorBlock) -> None:
        """Free a block and merge it with its free neighbors."""
        self.allocated -= block.size
        free = self._free[block.pool]
        if block.before in free:
            before = block.before
            free.remove(before)
            block.address, block.size = before.address, before.size + block.size
            block.before = before.before
            if block.before is not None:
                block.before.after = block
        if block.after in free:
            after = block.after
            free.remove(after)
            block.size, block.after = block.size + after.size, after.after
            if block.after is not None:
                block.after.before = block
        free.add(block)

    def empty_cache(self) -> None:
        """Release the segments that are completely free."""
        for free in self._free.values():
            for block in [one for one in free if one.before is one.after is None]:
                free.remove(block)
                self.reserved -= block.size


@dataclass(frozen=True, slots=True)
class PeakMemory:
    """Bytes at the peak of allocated memory; `reserved` has its own peak, None on a CPU."""

    allocated: int
    parts: dict[str, int] = field(default_factory=dict)
    reserved: int | None = None


def peak_memory(
    events: Iterable[AllocationEvent], parts: Mapping[int, AllocationCategory], *, on_gpu: bool
) -> PeakMemory:
    """Return the peak of a list of allocations; on a GPU in its allocator, rounding as a part."""
    allocator, blocks = CachingAllocator(), dict[int, AllocatorBlock]()
    now: Counter[str] = Counter()
    total = most = reserved = 0
    at_most: Mapping[str, int] = {}
    for event in events:
        taken = event.size
        if event.number == EMPTY_CACHE:
            allocator.empty_cache()
            continue
        if on_gpu and event.size:
            before = allocator.allocated
            if event.size > 0:
                blocks[event.number] = allocator.allocate(event.size, event.pool)
            else:
                allocator.release(blocks.pop(event.number))
            taken = allocator.allocated - before
            reserved = max(reserved, allocator.reserved)
        if event.pool != WAITING:
            now[parts[event.number]] += event.size
            total += taken
            if total > most:
                most, at_most = total, now.copy()
    found = {part.value: at_most.get(part, 0) for part in AllocationCategory}
    if not on_gpu:
        return PeakMemory(most, found)
    return PeakMemory(most, {**found, "rounding": most - sum(found.values())}, reserved)
