"""Summarize how the allocator's memory is split up, by segment, stream and pool; no I/O.

The list `segments` of a snapshot may come from another version of torch or an untrusted file: a
malformed segment or block is skipped, and a missing key counts as not recorded.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from stepscope.common.formatting import format_bytes
from stepscope.memory.snapshots.stacks import NO_STACK, StackTable

ACTIVE, AWAITING, FREE = 0, 1, 2  # States: allocated, freed but in use by a stream, free.
_STATES = {"active_allocated": ACTIVE, "active_awaiting_free": AWAITING}
MAX_SIZE = 2**62  # Sizes from here on are invalid.
PAGE_BYTES = {"small": 2 * 2**20, "large": 20 * 2**20}
"""Pages of an expandable segment, by its type; it grows and shrinks by whole pages.

torch 2.13, c10/cuda/CUDACachingAllocator.h: kSmallBuffer and kLargeBuffer."""
MAX_SEGMENTS = 60  # Maximum number of segments in the map of a device.
MAX_PARTS = 200  # Number of parts of a segment above which neighboring blocks are merged.
MAX_POOLS = 200  # Maximum number of streams and pools listed.


@dataclass(frozen=True, slots=True)
class Fragmentation:
    """How reserved memory is used, in bytes.

    `reserved` = `allocated` + `awaiting_free` + `cached` + `split`. `cached` can be returned to the
    driver, `split` cannot: it lies next to live blocks. `private_pools` is the part of `reserved`
    in pools other than the default one, such as those of CUDA graphs.
    """

    reserved: int
    allocated: int
    cached: int
    split: int
    largest_free: int
    private_pools: int
    awaiting_free: int = 0

    @property
    def text(self) -> str:
        """How reserved memory is used, as a sum."""
        waiting, pools = self.awaiting_free, self.private_pools
        later = f" + {format_bytes(waiting)} awaiting free" if waiting else ""
        private = f"; {format_bytes(pools)} in private pools" if pools else ""
        return (
            f"reserved {format_bytes(self.reserved)} = allocated {format_bytes(self.allocated)}"
            f"{later} + cached {format_bytes(self.cached)} + split {format_bytes(self.split)}; "
            f"largest free block {format_bytes(self.largest_free)}{private}"
        )


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
    """A stretch of a segment with one state; several blocks have no stack (NO_STACK)."""

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
    """All segments of a device, and the map of the most fragmented ones."""

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
        total = max(whole(segment.get("total_size")) or 0, sum(block.size for block in blocks))
        reserved += total
        private += total if pool_name(segment) else 0
        for block in blocks:
            used[block.state] += block.size
        is_used = any(block.state != FREE and block.size for block in blocks)
        cached += _returnable(segment, blocks) if is_used else total
        free = [block.size for block in blocks if block.state == FREE]
        largest_free = max([largest_free, *free, *([] if blocks else [total])])
    split = reserved - used[ACTIVE] - used[AWAITING] - cached
    return Fragmentation(
        reserved, used[ACTIVE], cached, split, largest_free, private, used[AWAITING]
    )


def segments_of(segments: object) -> Iterator[dict[str, Any]]:
    """Yield distinct segments with distinct blocks: a small file can list one a million times."""
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
        address = whole(block.get("address"))
        requested, code = min(size, requested or size), _STATES.get(state, FREE)
        yield SegmentBlock(start, size, requested, code, frames, address)
        start += size


def _returnable(segment: dict[str, Any], blocks: list[SegmentBlock]) -> int:
    """Return the free bytes that the driver can get back: whole pages of expandable segments."""
    if segment.get("is_expandable") is not True:
        return 0
    page = PAGE_BYTES.get(str(segment.get("segment_type")), PAGE_BYTES["large"])
    spans = (
        (-(-one.start // page), (one.start + one.size) // page)
        for one in blocks
        if one.state == FREE
    )
    return sum(max(0, end - first) for first, end in spans) * page


def whole(value: object) -> int | None:
    """Return a number of bytes, an address or a stream; None if it is invalid."""
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
    pools = [PoolMemory(*key, len(group), fragmentation(group)) for key, group in groups.items()]
    return tuple(sorted(pools, key=lambda pool: -pool.parts.reserved)[:MAX_POOLS])


def device_memory(segments: object, stacks: StackTable) -> tuple[DeviceSegments, ...]:
    """Return the memory of each device that has segments."""
    by_device = defaultdict(list)
    for segment in segments_of(segments):
        by_device[whole(segment.get("device")) or 0].append(segment)
    devices = sorted(by_device.items())[:MAX_SEGMENTS]
    return tuple(_device(device, group, stacks) for device, group in devices)


def _device(device: int, segments: list[dict[str, Any]], stacks: StackTable) -> DeviceSegments:
    ranked = [(segment, fragmentation([segment])) for segment in segments]
    ranked.sort(key=lambda pair: (-pair[1].split, -pair[1].reserved))
    live = [block for one in segments for block in blocks_of(one) if block.state == ACTIVE]
    return DeviceSegments(
        device,
        len(segments),
        len(live),
        sum(block.requested for block in live),
        fragmentation(segments),
        tuple(_row(segment, use, stacks) for segment, use in ranked[:MAX_SEGMENTS]),
    )


def _row(segment: dict[str, Any], use: Fragmentation, stacks: StackTable) -> SegmentRow:
    parts = []
    for block in blocks_of(segment):
        stack = stacks.number(block.frames) if block.state == ACTIVE else NO_STACK
        parts.append(SegmentSlice(block.size, block.state, stack))
    left = use.reserved - sum(part.size for part in parts)
    if left:
        parts.append(SegmentSlice(left, FREE, NO_STACK))
    if len(parts) > MAX_PARTS:
        parts = list(_merged(parts, use.reserved))
    stream, pool = whole(segment.get("stream")) or 0, pool_name(segment)
    return SegmentRow(stream, pool, use.reserved, use.allocated, use.split, tuple(parts))


def _merged(parts: Sequence[SegmentSlice], size: int) -> Iterable[SegmentSlice]:
    """Yield fewer parts: neighbors of up to 3/MAX_PARTS of the segment become one per state."""
    limit = 3 * size // MAX_PARTS
    sums = [0, 0, 0]
    for part in (*parts, None):
        if part is None or sum(sums) + part.size > limit:
            yield from (SegmentSlice(one, state, NO_STACK) for state, one in enumerate(sums) if one)
            sums = [0, 0, 0]
        if part is not None and part.size > limit:
            yield part
        elif part is not None:
            sums[part.state] += part.size
