"""Ring buffer in front of the store: a memory-mapped file with one slot of fixed size per row.

The training thread packs a row into the next slot: no lock, no allocation, no system call. The
kernel keeps the pages of a killed process. The file has a header of 1 MiB (the magic word, then
one JSON line per layout) and SLOTS slots of 128 bytes: layout, epoch seconds, step, up to 12 values
and, written last, the row's number plus one. A slot with another number is unwritten or torn.
"""

from __future__ import annotations

import itertools
import json
import mmap
import os
import struct
import threading
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from stepscope.common.files import is_network_filesystem, read_regular_file
from stepscope.store.schema import MAX_SERIES

MAGIC = b"stepscope ring 3\n"
HEADER_BYTES = 2**20  # thousands of combinations of metrics
SLOTS = 1 << 17
SLOT_BYTES = 128
FILE_BYTES = HEADER_BYTES + SLOTS * SLOT_BYTES
WIDTH = 12  # maximum number of values in a slot; a wider row takes several slots
MARGIN = 64  # slots never filled: up to 64 threads may pass the capacity check concurrently

SLOT = np.dtype(
    [("layout", "<i8"), ("ts", "<f8"), ("step", "<i8"), ("values", "<f8", WIDTH), ("number", "<i8")]
)
Slots = NDArray[np.void]


@dataclass(frozen=True, slots=True)
class RowLayout:
    """Number of a series and some of its metrics, and the function that packs them into a slot."""

    number: int
    pack: Callable[..., None]


@dataclass(frozen=True, slots=True)
class RingRows:
    """Rows of a ring in order, the number after them, and stream, source and metrics by layout."""

    slots: Slots
    end: int
    layouts: list[tuple[str, ...]]


class RingError(Exception):
    """A ring that cannot be used; the message is one sentence."""


class RingBuffer:
    """Ring of one process; `put` is thread-safe, `pending` and `release` are for one thread.

    Anonymous memory, with a `reason`, if a file fails or may block (on a network file system).
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.reason: str | None = None
        self.dropped = 0  # rows and events that are lost, slots that were never written included
        self.last = -1  # number of the newest row; approximate while several threads write
        self.end = SLOTS - MARGIN  # number of the first row without a free slot
        self.drained = 0  # rows before this number are in the store
        self._final: int | None = None
        """The exact end after `stop`: `last` may fall in a race of two threads."""
        self._layouts: dict[tuple[str, ...], RowLayout] = {}
        self._layout_lock = threading.Lock()
        self._header_used = len(MAGIC)
        slots = itertools.repeat(range(HEADER_BYTES, FILE_BYTES, SLOT_BYTES))
        self.claim = zip(itertools.count(), itertools.chain.from_iterable(slots)).__next__
        """Returns the number of the next row and the offset of its slot, atomically."""
        try:
            if is_network_filesystem(path):
                raise OSError("the folder is on a network file system")
            self.memory = _create_file(path)
        except OSError as error:
            self.reason = f"no file for the ring: {error.strerror or error}"
            self.memory = mmap.mmap(-1, FILE_BYTES)
        self.memory[: len(MAGIC)] = MAGIC
        self._slots = np.frombuffer(self.memory, SLOT, SLOTS, HEADER_BYTES)

    def layout(self, names: tuple[str, ...]) -> RowLayout | None:
        """Return the layout of a stream, a source and WIDTH metrics at most.

        Returns None if the header is full.
        """
        if names in self._layouts:
            return self._layouts[names]
        with self._layout_lock:
            if names in self._layouts:  # added by another thread meanwhile
                return self._layouts[names]
            line = json.dumps(names).encode() + b"\n"
            begin, end = self._header_used, self._header_used + len(line)
            if end >= HEADER_BYTES:
                return None
            # In the file before any row that needs it.
            self.memory[begin:end] = line
            self._header_used = end
            width = len(names) - 2
            pack = struct.Struct(f"<qdq{width}d{8 * (WIDTH - width)}xq").pack_into
            layout = self._layouts[names] = RowLayout(len(self._layouts), pack)
            return layout

    def put(self, layout: RowLayout, ts: float, step: int, *values: float) -> None:
        """Write one row; a full ring counts it in `dropped` instead."""
        if self.last >= self.end:
            self.dropped += 1
            return
        number, slot = self.claim()
        self.last = number
        layout.pack(self.memory, slot, layout.number, ts, step, *values, number + 1)

    def waiting(self) -> int:
        """Return the approximate number of rows pending for the writer; exact after `stop`."""
        return (self.last + 1 if self._final is None else self._final) - self.drained

    def pending(self, most: int = SLOTS) -> RingRows:
        """Return a copy of at most `most` rows before the first unwritten slot.

        Skips an unwritten slot before MARGIN later rows, or after `stop`: its thread was
        interrupted.
        """
        numbers = np.arange(self.drained, self.drained + min(most, self.waiting()))
        taken = self._slots[numbers % SLOTS]
        written = taken["number"] == numbers + 1
        first = len(written) if written.all() else int(np.argmin(written))
        if self._final is None and len(written) - first <= MARGIN:
            taken, written = taken[:first], written[:first]
        return RingRows(taken[written], self.drained + len(taken), list(self._layouts))

    def release(self, rows: RingRows) -> None:
        """Free the slots of stored rows."""
        self.dropped += rows.end - self.drained - len(rows.slots)
        self.drained = rows.end
        if self._final is None:
            self.end = rows.end + SLOTS - MARGIN

    def stop(self) -> None:
        """Accept no more rows; all claimed ones are `pending` now."""
        self.end = -1
        if self._final is None:
            self._final, _ = self.claim()

    def leave(self) -> None:
        """Detach a forked child from the parent's ring."""
        self.end = -1
        self._header_used = HEADER_BYTES  # a new layout would be written over the parent's

    def delete(self) -> None:
        """Delete the file; a later `put` changes nothing on disk."""
        if self.reason is None:
            self.path.unlink(missing_ok=True)


def read_ring(path: Path) -> bytes:
    """Return the content of the ring of a dead process. Raises RingError or OSError."""
    try:
        data = read_regular_file(path, FILE_BYTES)
    except ValueError:
        data = b""
    if len(data) != FILE_BYTES or not data.startswith(MAGIC):
        raise RingError(f"{path.name}: not a ring of this version.")
    return data


def rows_after(data: bytes, stored: int) -> RingRows:
    """Return the rows of a ring file from number `stored` on."""
    layouts = _read_layouts(data[len(MAGIC) : HEADER_BYTES])
    slots = np.frombuffer(data, SLOT, SLOTS, HEADER_BYTES)
    # Each number has one slot; a number in another slot is damage.
    number = slots["number"] - 1
    good = (
        (number >= stored)
        & (number % SLOTS == np.arange(SLOTS))
        & (slots["layout"] >= 0)
        & (slots["layout"] < len(layouts))
    )
    kept = slots[good][np.argsort(number[good])]
    return RingRows(kept, int(kept["number"][-1]) if len(kept) else stored, layouts)


def _read_layouts(header: bytes) -> list[tuple[str, ...]]:
    layouts = []
    series = set()
    for line in header.partition(b"\0")[0].splitlines():
        try:
            stream, source, *keys = map(str, json.loads(line))
        except (ValueError, TypeError, RecursionError):
            break  # written in part when the process was killed: no row has this layout
        series.add((stream, source))
        if len(series) > MAX_SERIES:  # a planted file; a reader omits more series too
            break
        layouts.append((stream, source, *keys[:WIDTH]))
    return layouts


def _create_file(path: Path) -> mmap.mmap:
    """Create and map the file. Raises OSError, and leaves no file then."""
    with path.open("xb+") as file:
        try:
            os.posix_fallocate(file.fileno(), 0, FILE_BYTES)
            return mmap.mmap(file.fileno(), FILE_BYTES)
        except OSError:  # such as too many open files
            path.unlink()
            raise
