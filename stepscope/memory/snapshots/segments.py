"""How the allocator's memory is split up, by segment, stream and pool.

Pure functions over the list `segments` of `torch.cuda.memory_snapshot()` or of a snapshot file.
Both may come from another version of torch or from an untrusted file: a segment or block of an
unexpected form is left out, and a missing key counts as not recorded.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from stepscope.memory.snapshots.stacks import NO_STACK, StackTable

ACTIVE, AWAITING, FREE = 0, 1, 2
"""States of a block: allocated, freed by the program but in use by a stream, free."""
_STATES = {
    "active_allocated": ACTIVE,
    "active_awaiting_free": AWAITING,
    "active_pending_free": AWAITING,  # older versions of torch
}
MAX_SIZE = 2**62  # Sizes from here on are invalid.
PAGE_BYTES = {"small": 2 * 2**20, "large": 20 * 2**20}
"""Pages in which an expandable segment takes and gives back memory, by its type.

torch 2.13, c10/cuda/CUDACachingAllocator.h: kSmallBuffer and kLargeBuffer."""
MAX_SEGMENTS = 60  # Segments in the map of a device.
MAX_PARTS = 200  # Parts of a segment in the map; neighboring blocks are merged above this number.
MAX_POOLS = 200  # Streams and pools listed.


@dataclass(frozen=True, slots=True)
class Fragmentation:
    """How reserved memory is used, in bytes.

    `reserved` = `allocated` + `awaiting_free` + `cached` + `split`. `cached` can be given back to
    the driver, `split` cannot: it lies beside live blocks. `largest_free` is the largest free block
    that an allocation can get. `private_pools` is the part of `reserved` in pools other than the
    default one, such as those of CUDA graphs.
    """

    reserved: int
    allocated: int
    cached: int
    split: int
    largest_free: int
    private_pools: int
    awaiting_free: int = 0


@dataclass(frozen=True, slots=True)
class SegmentBlock:
    """One block of a segment; `start` is its offset in bytes, `frames` are as in the file."""

    start: int
    size: int
    requested: int
    state: int
    frames: object
    address: int | None


@dataclass(frozen=True, slots=True)
class SegmentSlice:
    """A stretch of a segment: its bytes, and its state (ACTIVE, AWAITING or FREE).

    `stack` is that of its block; NO_STACK if it has none, or for several blocks.
    """

    size: int
    state: int
    stack: int


@dataclass(frozen=True, slots=True)
class SegmentRow:
    """One segment of the map; sizes in bytes. `pool` is "" for the default one."""

    stream: int
    pool: str
    size: int
    allocated: int
    split: int
    parts: tuple[SegmentSlice, ...]


@dataclass(frozen=True, slots=True)
class PoolMemory:
    """The bytes of one stream in one pool."""

    device: int
    stream: int
    pool: str
    segments: int
    parts: Fragmentation


@dataclass(frozen=True, slots=True)
class DeviceSegments:
    """All segments of a device, and the map of those in which most is split."""

    device: int
    segments: int
    live_blocks: int
    requested: int  # Bytes of live blocks as requested by the program.
    parts: Fragmentation
    rows: tuple[SegmentRow, ...]


def fragmentation(segments: object) -> Fragmentation:
    """Return how the allocator's reserved memory is used; all zero without segments."""
    reserved = cached = largest_free = private = 0
    used = [0, 0, 0]
    for segment in segments_of(segments):
        blocks = list(blocks_of(segment))
        total = segment_size(segment, blocks)
        reserved += total
        private += total if pool_name(segment) else 0
        for block in blocks:
            used[block.state] += block.size
        is_used = any(block.state != FREE and block.size for block in blocks)
        cached += _returnable(segment, blocks, total) if is_used else total
        free = [block.size for block in blocks if block.state == FREE]
        largest_free = max([largest_free, *free, *([] if blocks else [total])])
    split = reserved - used[ACTIVE] - used[AWAITING] - cached
    return Fragmentation(
        reserved, used[ACTIVE], cached, split, largest_free, private, used[AWAITING]
    )


def segments_of(segments: object) -> Iterator[dict[str, Any]]:
    """Yield the segments of a list; duplicates, also of their blocks, only once.

    A small file can list the same million blocks a million times.
    """
    seen: set[int] = set()
    for segment in _dicts(segments):
        blocks = segment.get("blocks")
        once = {id(segment), id(blocks)} if isinstance(blocks, list) else {id(segment)}
        if not once & seen:
            seen |= once
            yield segment


def _dicts(items: object) -> Iterator[dict[str, Any]]:
    """Yield the dicts of a list; nothing for another type."""
    if isinstance(items, list | tuple):
        yield from (item for item in items if type(item) is dict)


def blocks_of(segment: dict[str, Any]) -> Iterator[SegmentBlock]:
    """Yield a segment's blocks of a valid size, by address."""
    start = 0
    for block in _dicts(segment.get("blocks")):
        size, state = whole(block.get("size")), block.get("state")
        if size is None or not isinstance(state, str):
            continue
        requested, frames = whole(block.get("requested_size")), block.get("frames")
        if requested is None and block.get("history"):  # torch before 2.1
            first = next(_dicts(block["history"]), {})
            requested, frames = whole(first.get("real_size")), first.get("frames")
        address = whole(block.get("address"))
        requested, code = min(size, requested or size), _STATES.get(state, FREE)
        yield SegmentBlock(start, size, requested, code, frames, address)
        start += size


def segment_size(segment: dict[str, Any], blocks: list[SegmentBlock]) -> int:
    """Return a segment's bytes, at least those of its blocks."""
    return max(whole(segment.get("total_size")) or 0, sum(block.size for block in blocks))


def _returnable(segment: dict[str, Any], blocks: list[SegmentBlock], total: int) -> int:
    """Return the free bytes of a segment in use that can be given back.

    These are whole pages of expandable segments.
    """
    if segment.get("is_expandable") is not True:
        return 0
    page = PAGE_BYTES.get(str(segment.get("segment_type")), PAGE_BYTES["large"])
    found = 0
    for block in blocks:
        if block.state == FREE:
            first = -(-block.start // page) * page
            found += max(0, (block.start + block.size) // page * page - first)
    return min(found, total)


def whole(value: object) -> int | None:
    """Return a number of bytes, an address or a stream; None for an invalid one."""
    return value if type(value) is int and 0 <= value < MAX_SIZE else None


def pool_name(segment: dict[str, Any]) -> str:
    """Return the id of a segment's pool as text, "" for the default one."""
    pool = segment.get("segment_pool_id")
    if not isinstance(pool, list | tuple) or len(pool) != 2:
        return ""
    numbers = [whole(part) for part in pool]
    return "" if numbers == [0, 0] else ".".join("?" if n is None else str(n) for n in numbers)


def places(segments: object) -> tuple[PoolMemory, ...]:
    """Return the bytes of each stream and pool, the largest first."""
    groups = defaultdict(list)
    for segment in segments_of(segments):
        device, stream = whole(segment.get("device")) or 0, whole(segment.get("stream")) or 0
        groups[device, stream, pool_name(segment)].append(segment)
    found = [PoolMemory(*key, len(mine), fragmentation(mine)) for key, mine in groups.items()]
    return tuple(sorted(found, key=lambda place: -place.parts.reserved)[:MAX_POOLS])


def device_memory(segments: object, stacks: StackTable) -> tuple[DeviceSegments, ...]:
    """Return the memory of each device that has segments."""
    by_device = defaultdict(list)
    for segment in segments_of(segments):
        by_device[whole(segment.get("device")) or 0].append(segment)
    return tuple(
        _device(device, mine, stacks) for device, mine in sorted(by_device.items())[:MAX_SEGMENTS]
    )


def _device(device: int, segments: list[dict[str, Any]], stacks: StackTable) -> DeviceSegments:
    made = [(segment, fragmentation([segment])) for segment in segments]
    made.sort(key=lambda one: (-one[1].split, -one[1].reserved))
    live = [block for one in segments for block in blocks_of(one) if block.state == ACTIVE]
    return DeviceSegments(
        device,
        len(segments),
        len(live),
        sum(block.requested for block in live),
        fragmentation(segments),
        tuple(_row(segment, parts, stacks) for segment, parts in made[:MAX_SEGMENTS]),
    )


def _row(segment: dict[str, Any], found: Fragmentation, stacks: StackTable) -> SegmentRow:
    shown, left = [], found.reserved
    for block in blocks_of(segment):
        stack = stacks.number(block.frames) if block.state == ACTIVE else NO_STACK
        shown.append(SegmentSlice(block.size, block.state, stack))
        left -= block.size
    if left:
        shown.append(SegmentSlice(left, FREE, NO_STACK))
    if len(shown) > MAX_PARTS:
        shown = list(_merged(shown, found.reserved))
    stream = whole(segment.get("stream")) or 0
    return SegmentRow(
        stream, pool_name(segment), found.reserved, found.allocated, found.split, tuple(shown)
    )


def _merged(parts: Sequence[SegmentSlice], size: int) -> Iterable[SegmentSlice]:
    """Yield fewer parts: neighbors within a MAX_PARTS-th of the segment become up to three."""
    limit = 3 * size // MAX_PARTS
    sums = [0, 0, 0]
    for part in parts:
        if sum(sums) + part.size > limit:
            yield from _sums(sums)
            sums = [0, 0, 0]
        if part.size > limit:
            yield part
        else:
            sums[part.state] += part.size
    yield from _sums(sums)


def _sums(sums: list[int]) -> Iterable[SegmentSlice]:
    return (SegmentSlice(size, state, NO_STACK) for state, size in enumerate(sums) if size)
