"""Torch's caching allocator for CUDA as a model: which blocks and segments a list of events takes.

The rules are those of c10/cuda/CUDACachingAllocator.cpp (torch 2.11 to 2.13) without
`expandable_segments`: sizes are rounded up to 512 B; up to 1 MiB comes from segments of 2 MiB, up
to 10 MiB from segments of 20 MiB, more from segments of its own size rounded up to 2 MiB. A free
block of at least the size is used before a new segment is asked for, the smallest that fits; what
is left of it becomes a block of its own if it is large enough. Nothing is given back to the device.
"""

from __future__ import annotations

import bisect
from dataclasses import dataclass

MIN_BLOCK = 512
SMALL_SIZE = 2**20
SMALL_SEGMENT = 2 * 2**20
LARGE_SEGMENT = 20 * 2**20
MIN_LARGE_ALLOCATION = 10 * 2**20
ROUND_LARGE = 2 * 2**20


def rounded(size: int) -> int:
    """Return the size of the block that is looked for."""
    return max(MIN_BLOCK, -(-size // MIN_BLOCK) * MIN_BLOCK)


def segment_size(size: int) -> int:
    """Return the size of the segment that a block of a rounded size needs if none is free."""
    if size <= SMALL_SIZE:
        return SMALL_SEGMENT
    if size < MIN_LARGE_ALLOCATION:
        return LARGE_SEGMENT
    return -(-size // ROUND_LARGE) * ROUND_LARGE


@dataclass(slots=True, eq=False)
class Block:
    """A part of a segment; `before` and `after` are its neighbors in it."""

    size: int
    address: int
    small: bool
    pool: str
    free: bool = False
    before: Block | None = None
    after: Block | None = None


class CachingAllocator:
    """Serves allocations; `allocated` and `reserved` are bytes now."""

    def __init__(self) -> None:
        self.allocated = 0
        self.reserved = 0
        self._free: dict[tuple[str, bool], list[tuple[int, int]]] = {}
        self._blocks: dict[int, Block] = {}  # the free ones, by address
        self._address = 0

    def allocate(self, size: int, pool: str = "") -> Block:
        """Return a block; its size may be larger than what was asked for."""
        wanted = rounded(size)
        small = wanted <= SMALL_SIZE
        block = self._found(wanted, small, pool) or self._new(wanted, small, pool)
        left = block.size - wanted
        if left >= MIN_BLOCK if small else left > SMALL_SIZE:
            self._split(block, wanted)
        self.allocated += block.size
        return block

    def release(self, block: Block) -> None:
        """Take a block back and join it with the free ones beside it."""
        self.allocated -= block.size
        for near in (block.before, block.after):
            if near is not None and near.free:
                self._take_out(near)
                self._join(block, near)
        self._put(block)

    def empty_cache(self) -> None:
        """Give segments back that are free as a whole."""
        for address, block in list(self._blocks.items()):
            if block.before is None and block.after is None:
                self._take_out(self._blocks[address])
                self.reserved -= block.size

    def _found(self, wanted: int, small: bool, pool: str) -> Block | None:
        free = self._free.get((pool, small), [])
        place = bisect.bisect_left(free, (wanted, -1))
        if place == len(free):
            return None
        block = self._blocks[free[place][1]]
        self._take_out(block)
        return block

    def _new(self, wanted: int, small: bool, pool: str) -> Block:
        size = segment_size(wanted)
        self.reserved += size
        block = Block(size, self._address, small, pool)
        self._address += size
        return block

    def _split(self, block: Block, wanted: int) -> None:
        rest = Block(
            block.size - wanted,
            block.address + wanted,
            block.small,
            block.pool,
            before=block,
            after=block.after,
        )
        if block.after is not None:
            block.after.before = rest
        block.after, block.size = rest, wanted
        self._put(rest)

    def _join(self, block: Block, near: Block) -> None:
        if near is block.before:
            block.address, block.before = near.address, near.before
            if near.before is not None:
                near.before.after = block
        else:
            block.after = near.after
            if near.after is not None:
                near.after.before = block
        block.size += near.size

    def _put(self, block: Block) -> None:
        block.free = True
        self._blocks[block.address] = block
        bisect.insort(
            self._free.setdefault((block.pool, block.small), []), (block.size, block.address)
        )

    def _take_out(self, block: Block) -> None:
        block.free = False
        del self._blocks[block.address]
        free = self._free[block.pool, block.small]
        del free[bisect.bisect_left(free, (block.size, block.address))]
