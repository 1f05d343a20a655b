"""What the allocator's segments hold: the largest live blocks, and how its memory is split up.

Pure functions over the list `segments` of `torch.cuda.memory_snapshot()` or of a snapshot file.
Both may come from another version of torch or from a foreign file: a segment or block that has not
the expected form is left out, a key that is missing counts as not given.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from stepscope.memory.snapshots.stacks import NO_STACK, StackTable, module_of, stack_texts

ALLOCATED = "active_allocated"
AWAITING_FREE = ("active_awaiting_free", "active_pending_free")
"""Freed by the program, and still in use by another stream; the second is torch's older word."""
LARGEST_SIZE = 2**62
"""No memory has more bytes: a larger figure is not one."""
PAGE_BYTES = {"small": 2 * 2**20, "large": 20 * 2**20}
"""Pages in which an expandable segment takes and gives back memory, by its type.

torch 2.13, c10/cuda/CUDACachingAllocator.h: kSmallBuffer and kLargeBuffer."""


@dataclass(frozen=True, slots=True)
class LiveAllocations:
    """Live memory of one stream that one stack has allocated; sums over `count` equal blocks.

    `size` is what the blocks take (rounded up by the allocator), `requested` what was asked for;
    both in bytes. `frames` are the stack's lines, innermost first, () where none was recorded.
    """

    size: int
    requested: int
    stream: int
    frames: tuple[str, ...]
    module: str | None
    count: int = 1


@dataclass(frozen=True, slots=True)
class Fragmentation:
    """How reserved memory is used, in bytes.

    `reserved` = `allocated` + `awaiting_free` + `cached` + `split`. `cached` can be given back to
    the driver, `split` cannot: it lies beside live blocks. `largest_free` is the largest free block
    that an allocation can get. `private_pools` is what of `reserved` belongs to pools of CUDA
    graphs and to other pools of their own.
    """

    reserved: int
    allocated: int
    cached: int
    split: int
    largest_free: int
    private_pools: int
    awaiting_free: int = 0


@dataclass(frozen=True, slots=True)
class Block:
    """One block of a segment as far as it is told; `start` in bytes from the segment's begin."""

    start: int
    size: int
    requested: int
    state: str
    frames: object
    """As in the file: not yet looked at."""
    address: int | None

    @property
    def allocated(self) -> bool:
        """Say whether a tensor or a library holds it."""
        return self.state == ALLOCATED

    @property
    def free(self) -> bool:
        """Say whether an allocation can take it."""
        return not self.allocated and self.state not in AWAITING_FREE


def largest_blocks(segments: object, count: int = 20) -> tuple[LiveAllocations, ...]:
    """Return where the most live memory was allocated, the largest first, at most `count`.

    Blocks of the same stack and stream are added up.
    """
    found: dict[tuple[int, tuple[str, ...]], list[int]] = {}
    stacks: dict[int, tuple[str, ...]] = {}
    for segment in segments_of(segments):
        stream = whole(segment.get("stream")) or 0
        for block in blocks_of(segment):
            if not block.allocated:
                continue
            # torch shares one list among all blocks of a stack: it is read once.
            frames = stacks.get(id(block.frames))
            if frames is None:
                frames = stacks[id(block.frames)] = stack_texts(block.frames)
            sums = found.setdefault((stream, frames), [0, 0, 0])
            sums[0] += block.size
            sums[1] += block.requested
            sums[2] += 1
    largest = sorted(found.items(), key=lambda item: (-item[1][0], item[0]))[: max(0, count)]
    return tuple(
        LiveAllocations(size, requested, stream, frames, module_of(frames), number)
        for (stream, frames), (size, requested, number) in largest
    )


def fragmentation(segments: object) -> Fragmentation:
    """Return how the allocator's reserved memory is used; all zero without segments."""
    reserved = allocated = awaiting = cached = largest_free = private = 0
    for segment in segments_of(segments):
        blocks = list(blocks_of(segment))
        total = segment_size(segment, blocks)
        reserved += total
        private += total if private_pool(segment) else 0
        live = sum(block.size for block in blocks if block.allocated)
        waiting = sum(block.size for block in blocks if not block.allocated and not block.free)
        allocated, awaiting = allocated + live, awaiting + waiting
        cached += _returnable(segment, blocks, total) if live + waiting else total
        free = [block.size for block in blocks if block.free]
        largest_free = max([largest_free, *free, *([] if blocks else [total])])
    split = reserved - allocated - awaiting - cached
    return Fragmentation(reserved, allocated, cached, split, largest_free, private, awaiting)


def segments_of(segments: object) -> Iterator[dict[str, Any]]:
    """Yield the segments of a list, one that is listed again, or shares its blocks, only once.

    A small file can list the same million blocks a million times.
    """
    seen: set[int] = set()
    for segment in dicts(segments):
        blocks = segment.get("blocks")
        once = {id(segment), id(blocks)} if isinstance(blocks, list) else {id(segment)}
        if not once & seen:
            seen |= once
            yield segment


def dicts(items: object) -> Iterator[dict[str, Any]]:
    """Yield the dicts of a list; nothing where it is none."""
    if isinstance(items, list | tuple):
        yield from (item for item in items if type(item) is dict)


def blocks_of(segment: dict[str, Any]) -> Iterator[Block]:
    """Yield a segment's blocks in the order of their place, those whose size is told."""
    start = 0
    for block in dicts(segment.get("blocks")):
        size, state = whole(block.get("size")), block.get("state")
        if size is None or not isinstance(state, str):
            continue
        requested, frames = whole(block.get("requested_size")), block.get("frames")
        if requested is None and block.get("history"):  # torch before 2.1
            first = next(dicts(block["history"]), {})
            requested, frames = whole(first.get("real_size")), first.get("frames")
        address = whole(block.get("address"))
        yield Block(start, size, min(size, requested or size), state, frames, address)
        start += size


def segment_size(segment: dict[str, Any], blocks: list[Block]) -> int:
    """Return a segment's bytes, never less than its blocks have."""
    return max(whole(segment.get("total_size")) or 0, sum(block.size for block in blocks))


def private_pool(segment: dict[str, Any]) -> bool:
    """Say whether a segment belongs to a pool of its own, such as that of a CUDA graph."""
    pool = segment.get("segment_pool_id")
    return isinstance(pool, list | tuple) and any(whole(part) != 0 for part in pool)


def _returnable(segment: dict[str, Any], blocks: list[Block], total: int) -> int:
    """Return the free bytes of a segment in use that can be given back: whole pages of expandable
    segments only."""
    if segment.get("is_expandable") is not True:
        return 0
    page = PAGE_BYTES.get(str(segment.get("segment_type")), PAGE_BYTES["large"])
    found = 0
    for block in blocks:
        if block.free:
            first = -(-block.start // page) * page
            found += max(0, (block.start + block.size) // page * page - first)
    return min(found, total)


def whole(value: object) -> int | None:
    """Return a number of bytes, an address or a stream; None for anything else."""
    return value if type(value) is int and 0 <= value < LARGEST_SIZE else None


ROWS_LIMIT = 60
"""Segments in the map of a device."""
PARTS_LIMIT = 200
"""Parts of a segment in the map; of more blocks neighbors are taken together."""
PLACES_LIMIT = 200
"""Streams and pools listed."""

ACTIVE, AWAITING, FREE = 0, 1, 2


@dataclass(frozen=True, slots=True)
class SegmentSlice:
    """A stretch of a segment: its bytes, and what it is (ACTIVE, AWAITING or FREE).

    `stack` is that of its block; NO_STACK where it has none, or stands for several blocks.
    """

    size: int
    state: int
    stack: int


@dataclass(frozen=True, slots=True)
class SegmentRow:
    """One segment of the map; sizes in bytes."""

    stream: int
    pool: str
    """"" for the default one."""
    kind: str
    """torch's word for it: small or large."""
    expandable: bool
    size: int
    allocated: int
    split: int
    blocks: int
    parts: tuple[SegmentSlice, ...]


@dataclass(frozen=True, slots=True)
class StreamPoolUsage:
    """The bytes of one stream in one pool."""

    device: int
    stream: int
    pool: str
    segments: int
    blocks: int
    parts: Fragmentation


@dataclass(frozen=True, slots=True)
class DeviceSegments:
    """All segments of a device, and the map of those in which most is split."""

    device: int
    segments: int
    live_blocks: int
    requested: int
    """Bytes of live blocks as the program asked for them."""
    parts: Fragmentation
    rows: tuple[SegmentRow, ...]


def device_memory(segments: object, stacks: StackTable) -> tuple[DeviceSegments, ...]:
    """Return the memory of each device that has segments."""
    by_device = defaultdict(list)
    for segment in segments_of(segments):
        by_device[whole(segment.get("device")) or 0].append(segment)
    return tuple(
        _device(device, mine, stacks) for device, mine in sorted(by_device.items())[:ROWS_LIMIT]
    )


def places(segments: object) -> tuple[StreamPoolUsage, ...]:
    """Return the bytes of each stream and pool, the largest first."""
    groups = defaultdict(list)
    for segment in segments_of(segments):
        device, stream = whole(segment.get("device")) or 0, whole(segment.get("stream")) or 0
        groups[device, stream, pool_name(segment)].append(segment)
    found = [
        StreamPoolUsage(
            *key, len(mine), sum(1 for one in mine for _ in blocks_of(one)), fragmentation(mine)
        )
        for key, mine in groups.items()
    ]
    return tuple(sorted(found, key=lambda place: -place.parts.reserved)[:PLACES_LIMIT])


def pool_name(segment: dict[str, Any]) -> str:
    """Return the id of a segment's pool as text, "" for the default one."""
    pool = segment.get("segment_pool_id")
    if not isinstance(pool, list | tuple) or len(pool) != 2:
        return ""
    numbers = [whole(part) for part in pool]
    return "" if numbers == [0, 0] else ".".join("?" if n is None else str(n) for n in numbers)


def _device(device: int, segments: list[dict[str, Any]], stacks: StackTable) -> DeviceSegments:
    made = []
    live = requested = 0
    for segment in segments:
        blocks = list(blocks_of(segment))
        made.append((segment, blocks, fragmentation([segment])))
        live += sum(1 for block in blocks if block.allocated)
        requested += sum(block.requested for block in blocks if block.allocated)
    made.sort(key=lambda one: (-one[2].split, -one[2].reserved))
    rows = [_row(segment, blocks, parts, stacks) for segment, blocks, parts in made[:ROWS_LIMIT]]
    return DeviceSegments(
        device, len(segments), live, requested, fragmentation(segments), tuple(rows)
    )


def _row(
    segment: dict[str, Any], blocks: list[Block], parts: Fragmentation, stacks: StackTable
) -> SegmentRow:
    size = segment_size(segment, blocks)
    shown = [SegmentSlice(block.size, _state(block), _stack(block, stacks)) for block in blocks]
    left = size - sum(block.size for block in blocks)
    if left:
        shown.append(SegmentSlice(left, FREE, NO_STACK))
    return SegmentRow(
        stream=whole(segment.get("stream")) or 0,
        pool=pool_name(segment),
        kind="small" if segment.get("segment_type") == "small" else "large",
        expandable=segment.get("is_expandable") is True,
        size=size,
        allocated=parts.allocated,
        split=parts.split,
        blocks=len(blocks),
        parts=tuple(shown if len(shown) <= PARTS_LIMIT else _together(shown, size)),
    )


def _state(block: Block) -> int:
    return ACTIVE if block.allocated else FREE if block.free else AWAITING


def _stack(block: Block, stacks: StackTable) -> int:
    return stacks.number(block.frames) if block.allocated else NO_STACK


def _together(parts: Sequence[SegmentSlice], size: int) -> Iterable[SegmentSlice]:
    """Yield fewer parts: neighbors within a PARTS_LIMIT-th of the segment become up to three."""
    limit = 3 * size // PARTS_LIMIT
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
