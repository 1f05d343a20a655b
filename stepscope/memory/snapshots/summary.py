"""Summarize a memory snapshot by stack, and compare two; no I/O.

A snapshot may come from another version of torch or an untrusted file: malformed segments, blocks
and frames are skipped, and a missing key counts as not recorded.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from stepscope.common.formatting import printable

MAX_TEXT_CHARS = 300  # Of a file's name, from its end, and of a function's name.
_INSTALLED = ("/site-packages/", "/dist-packages/", "/torch/", "/lib/python3", "<frozen ")


def frame_text(frame: object) -> str | None:
    """Return a frame as one line; None if it is malformed or names no place.

    >>> frame_text({"filename": "/home/me/train.py", "line": 12, "name": "loss"})
    '/home/me/train.py:12 in loss'
    """
    if type(frame) is not dict:
        return None
    filename, line, name = frame.get("filename"), frame.get("line"), frame.get("name")
    if not isinstance(filename, str) or not isinstance(name, str):
        return None
    if filename in ("", "??") and name in ("", "??"):
        return None
    place = printable(filename[-MAX_TEXT_CHARS:]) or "??"
    if type(line) is int and 0 < line < 10**9:
        place += f":{line}"
    return f"{place} in {printable(name[:MAX_TEXT_CHARS])}"


def where(frames: Sequence[str]) -> str:
    """Return the innermost line outside of installed packages, and the line that allocated.

    >>> where(["/v/site-packages/torch/functional.py:5 in dot", "/me/net.py:7 in forward"])
    'net.py:7 in forward, by functional.py:5 in dot'
    """
    if not frames:
        return "No stack recorded"
    own = (frame for frame in frames if not any(part in frame for part in _INSTALLED))
    line = next(own, frames[0])
    return short(line) if line == frames[0] else f"{short(line)}, by {short(frames[0])}"


def short(frame: str) -> str:
    """Return a frame with the last part of its path alone.

    >>> short("/home/me/train.py:12 in loss")
    'train.py:12 in loss'
    """
    place, _, name = frame.rpartition(" in ")
    return f"{place.replace(chr(92), '/').rpartition('/')[2]} in {name}"


MAX_STACKS = 1000  # Stacks with live memory that are listed; programs have some hundred.
MAX_FRAMES = 100  # Frames of a stack, the innermost ones; those of C++ make up to 100.
MAX_SIZE = 2**62  # Sizes in bytes from here on are invalid.
ACTIVE = "active_allocated"
Frames = tuple[str, ...]
"""Lines of a stack, innermost first."""


@dataclass(frozen=True, slots=True)
class LiveStack:
    """Live blocks of one stack on one device; `frames` is () if torch did not record them."""

    device: int
    frames: Frames
    size: int  # Bytes.
    blocks: int


@dataclass(frozen=True, slots=True)
class SnapshotSummary:
    """The live memory of a snapshot in bytes, all devices together."""

    reserved: int
    allocated: int
    blocks: int
    stacks: tuple[LiveStack, ...]  # The largest first, at most MAX_STACKS.
    stack_count: int  # Of all stacks, listed or not.

    @property
    def left_size(self) -> int:
        """Bytes of the stacks that are not listed."""
        return self.allocated - sum(stack.size for stack in self.stacks)


def summarize(root: Mapping[Any, Any]) -> SnapshotSummary:
    """Return the summary of a snapshot as torch writes it."""
    sizes: Counter[tuple[int, Frames]] = Counter()
    blocks: Counter[tuple[int, Frames]] = Counter()
    reader = _StackReader()
    reserved = 0
    for segment in _segments(root.get("segments")):
        device = _size(segment.get("device")) or 0
        segment_size = 0
        for block in _dicts(segment.get("blocks")):
            size = _size(block.get("size"))
            if size is None:
                continue
            segment_size += size
            if block.get("state") == ACTIVE:
                key = device, reader.read(block.get("frames"))
                sizes[key] += size
                blocks[key] += 1
        reserved += max(_size(segment.get("total_size")) or 0, segment_size)
    stacks = [LiveStack(*key, size, blocks[key]) for key, size in sizes.items()]
    stacks.sort(key=lambda stack: (-stack.size, stack.device, stack.frames))
    return SnapshotSummary(
        reserved=reserved,
        allocated=sizes.total(),
        blocks=blocks.total(),
        stacks=tuple(stacks[:MAX_STACKS]),
        stack_count=len(stacks),
    )


class _StackReader:
    """Reads each list of frames once; the snapshot keeps the lists alive, so ids are unique."""

    def __init__(self) -> None:
        self._stacks: dict[int, tuple[str, ...]] = {}
        self._texts: dict[int, str | None] = {}

    def read(self, frames: object) -> tuple[str, ...]:
        """Return the lines of a stack."""
        if not isinstance(frames, list | tuple):
            return ()
        if id(frames) not in self._stacks:
            texts = map(self._text, frames[:MAX_FRAMES])
            self._stacks[id(frames)] = tuple(text for text in texts if text is not None)
        return self._stacks[id(frames)]

    def _text(self, frame: object) -> str | None:
        if id(frame) not in self._texts:
            self._texts[id(frame)] = frame_text(frame)
        return self._texts[id(frame)]


def _segments(segments: object) -> Iterator[dict[str, Any]]:
    """Yield distinct segments with distinct blocks: a small file can list one a million times."""
    seen: set[int] = set()
    for segment in _dicts(segments):
        blocks = segment.get("blocks")
        ids = {id(segment), id(blocks)} if isinstance(blocks, list) else {id(segment)}
        if not ids & seen:
            seen |= ids
            yield segment


def _dicts(items: object) -> Iterator[dict[str, Any]]:
    """Yield the dicts of a list; nothing for another type."""
    if isinstance(items, list | tuple):
        yield from (item for item in items if type(item) is dict)


def _size(value: object) -> int | None:
    """Return a number of bytes or of a device; None if it is invalid."""
    return value if type(value) is int and 0 <= value < MAX_SIZE else None


@dataclass(frozen=True, slots=True)
class StackChange:
    """Live bytes and blocks of one stack in two snapshots."""

    frames: Frames
    before: int
    after: int
    blocks_before: int
    blocks_after: int

    @property
    def size(self) -> int:
        """Change of the live bytes, negative for freed bytes."""
        return self.after - self.before

    @property
    def blocks(self) -> int:
        """Change of the number of live blocks."""
        return self.blocks_after - self.blocks_before


@dataclass(frozen=True, slots=True)
class SnapshotDiff:
    """The changes from one snapshot to another, the largest first, all devices together."""

    changes: tuple[StackChange, ...]
    before: int  # All live bytes.
    after: int
    complete: bool  # False if either has stacks that are not listed, and so not compared.


def difference(first: SnapshotSummary, second: SnapshotSummary) -> SnapshotDiff:
    """Return the changes of live memory by the allocating stack: addresses differ across runs."""
    sizes_before, blocks_before = _by_frames(first)
    sizes_after, blocks_after = _by_frames(second)
    changes = [
        StackChange(
            frames=frames,
            before=sizes_before[frames],
            after=sizes_after[frames],
            blocks_before=blocks_before[frames],
            blocks_after=blocks_after[frames],
        )
        for frames in {*blocks_before, *blocks_after}
    ]
    changed = [change for change in changes if change.size or change.blocks]
    changed.sort(key=lambda change: (-abs(change.size), change.frames))
    return SnapshotDiff(
        changes=tuple(changed),
        before=first.allocated,
        after=second.allocated,
        complete=max(first.stack_count, second.stack_count) <= MAX_STACKS,
    )


def _by_frames(summary: SnapshotSummary) -> tuple[Counter[Frames], Counter[Frames]]:
    """Return the bytes and the number of live blocks by stack."""
    sizes: Counter[Frames] = Counter()
    blocks: Counter[Frames] = Counter()
    for stack in summary.stacks:
        sizes[stack.frames] += stack.size
        blocks[stack.frames] += stack.blocks
    return sizes, blocks
