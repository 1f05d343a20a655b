"""The segments of a snapshot as rows of blocks, bounded, and the bytes of each device and pool."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from stepscope.memory.snapshots.segments import (
    Block,
    Fragmentation,
    blocks_of,
    fragmentation,
    segment_size,
    segments_of,
    whole,
)
from stepscope.memory.snapshots.z_stacks import NO_STACK, Stacks

ROWS_LIMIT = 60
"""Segments in the map of a device."""
PARTS_LIMIT = 200
"""Parts of a segment in the map; of more blocks neighbors are taken together."""
PLACES_LIMIT = 200
"""Streams and pools listed."""

ACTIVE, AWAITING, FREE = 0, 1, 2


@dataclass(frozen=True, slots=True)
class Part:
    """A stretch of a segment: its bytes, and what it is (ACTIVE, AWAITING or FREE).

    `stack` is that of its block; NO_STACK where it has none, or stands for several blocks.
    """

    size: int
    state: int
    stack: int


@dataclass(frozen=True, slots=True)
class Row:
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
    parts: tuple[Part, ...]


@dataclass(frozen=True, slots=True)
class Place:
    """The bytes of one stream in one pool."""

    device: int
    stream: int
    pool: str
    segments: int
    blocks: int
    parts: Fragmentation


@dataclass(frozen=True, slots=True)
class DeviceMemory:
    """All segments of a device, and the map of those in which most is split."""

    device: int
    segments: int
    live_blocks: int
    requested: int
    """Bytes of live blocks as the program asked for them."""
    parts: Fragmentation
    rows: tuple[Row, ...]


def device_memory(segments: object, stacks: Stacks) -> tuple[DeviceMemory, ...]:
    """Return the memory of each device that has segments."""
    by_device = defaultdict(list)
    for segment in segments_of(segments):
        by_device[whole(segment.get("device")) or 0].append(segment)
    return tuple(
        _device(device, mine, stacks) for device, mine in sorted(by_device.items())[:ROWS_LIMIT]
    )


def places(segments: object) -> tuple[Place, ...]:
    """Return the bytes of each stream and pool, the largest first."""
    groups = defaultdict(list)
    for segment in segments_of(segments):
        device, stream = whole(segment.get("device")) or 0, whole(segment.get("stream")) or 0
        groups[device, stream, pool_name(segment)].append(segment)
    found = [
        Place(*key, len(mine), sum(1 for one in mine for _ in blocks_of(one)), fragmentation(mine))
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


def _device(device: int, segments: list[dict[str, Any]], stacks: Stacks) -> DeviceMemory:
    made = []
    live = requested = 0
    for segment in segments:
        blocks = list(blocks_of(segment))
        made.append((segment, blocks, fragmentation([segment])))
        live += sum(1 for block in blocks if block.allocated)
        requested += sum(block.requested for block in blocks if block.allocated)
    made.sort(key=lambda one: (-one[2].split, -one[2].reserved))
    rows = [_row(segment, blocks, parts, stacks) for segment, blocks, parts in made[:ROWS_LIMIT]]
    return DeviceMemory(
        device, len(segments), live, requested, fragmentation(segments), tuple(rows)
    )


def _row(segment: dict[str, Any], blocks: list[Block], parts: Fragmentation, stacks: Stacks) -> Row:
    size = segment_size(segment, blocks)
    shown = [Part(block.size, _state(block), _stack(block, stacks)) for block in blocks]
    left = size - sum(block.size for block in blocks)
    if left:
        shown.append(Part(left, FREE, NO_STACK))
    return Row(
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


def _stack(block: Block, stacks: Stacks) -> int:
    return stacks.number(block.frames) if block.allocated else NO_STACK


def _together(parts: Sequence[Part], size: int) -> Iterable[Part]:
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


def _sums(sums: list[int]) -> Iterable[Part]:
    return (Part(size, state, NO_STACK) for state, size in enumerate(sums) if size)
