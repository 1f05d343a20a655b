"""Ring buffer in front of the store: a memory-mapped file with one slot of fixed size per row.

The training thread packs a row into the next slot: no lock, no allocation, no system call. The
kernel keeps the pages of a killed process. The file has a header of 64 KiB (the magic word, then
one JSON line per layout) and SLOTS slots of 128 bytes: layout, epoch seconds, step, up to 12 values
and, written last, the row's number plus one. A slot with another number is unwritten or torn.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import mmap
import os
import struct
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from stepscope.common.files import is_network_filesystem, open_regular_file, try_lock

MAGIC = b"stepscope ring 1\n"
HEADER_BYTES = 64 * 1024
SLOTS = 1 << 17
SLOT_BYTES = 128
FILE_BYTES = HEADER_BYTES + SLOTS * SLOT_BYTES
WIDTH = 12  # maximum number of values in a slot; a wider row takes several slots
MARGIN = 64  # slots never filled: up to 64 threads may pass the capacity check concurrently
HOLE_S = 1.0
"""Age at which a claimed slot counts as lost: its thread was interrupted before writing."""
SETTLE_S = 0.05  # usual maximum time of a thread from claiming to writing

SLOT = np.dtype(
    [("layout", "<i8"), ("ts", "<f8"), ("step", "<i8"), ("values", "<f8", WIDTH), ("number", "<i8")]
)
Slots = NDArray[np.void]


@dataclass(frozen=True, slots=True)
class RowLayout:
    """Number of a list of metrics, and the function that packs its rows into a slot."""

    number: int
    pack: Callable[..., None]


@dataclass(frozen=True, slots=True)
class PendingRows:
    """Rows pending for the writer, and the number after them."""

    slots: Slots
    upto: int


class RingError(Exception):
    """A ring that cannot be used; the message is one sentence."""


class RingBuffer:
    """Ring of one process; `put` is thread-safe, `pending` and `release` are for one thread.

    Anonymous memory, with a `reason`, if a file fails or may block (on a network file system).
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.reason: str | None = None
        self.dropped = 0  # rows refused because the ring was full
        self.lost = 0  # slots that were claimed and never written
        self.last = -1  # number of the newest row; approximate while several threads write
        self.end = SLOTS - MARGIN  # number of the first row without a free slot
        self.drained = 0  # rows before this number are in the store
        self._final: int | None = None
        """The exact end after `stop`: `last` may fall in a race of two threads."""
        self._hole_since: float | None = None
        self._layouts: dict[tuple[tuple[str, ...], bool], RowLayout] = {}
        self._layout_lock = threading.Lock()
        self._header_used = len(MAGIC)
        slots = itertools.repeat(range(HEADER_BYTES, FILE_BYTES, SLOT_BYTES))
        self.claim = zip(itertools.count(), itertools.chain.from_iterable(slots)).__next__
        """Returns the number of the next row and the offset of its slot, atomically."""
        self._lock: int | None = None
        try:
            if is_network_filesystem(path):
                raise OSError("the folder is on a network file system")
            self.memory, self._lock = _create_file(path)
        except OSError as error:
            self.reason = f"no file for the ring: {error.strerror or error}"
            self.memory = mmap.mmap(-1, FILE_BYTES)
        self.memory[: len(MAGIC)] = MAGIC
        self._slots = np.frombuffer(self.memory, SLOT, SLOTS, HEADER_BYTES)

    def layout(self, keys: tuple[str, ...], timed: bool) -> RowLayout | None:
        """Return the layout of these keys (WIDTH at most); None if the header is full."""
        layout = self._layouts.get((keys, timed))
        return layout if layout is not None else self._new_layout(keys, timed)

    def put(self, layout: RowLayout, ts: float, step: int, values: Iterable[float | None]) -> None:
        """Write one row; a full ring counts it in `dropped` instead."""
        if self.last >= self.end:
            self.dropped += 1
            return
        number, slot = self.claim()
        self.last = number
        layout.pack(self.memory, slot, layout.number, ts, step, *values, number + 1)

    def waiting(self) -> int:
        """Return the approximate number of rows pending for the writer."""
        return (self.last + 1 if self._final is None else self._final) - self.drained

    def pending(self, *, everything: bool = False, most: int = SLOTS) -> PendingRows:
        """Return a copy of at most `most` rows before the first unwritten slot.

        Skips unwritten slots after HOLE_S, or with `everything` after SETTLE_S.
        """
        numbers = np.arange(self.drained, self.drained + min(most, self.waiting()))
        taken = self._slots[numbers % SLOTS]
        written = taken["number"] == numbers + 1
        if everything and not written.all():
            time.sleep(SETTLE_S)
            taken = self._slots[numbers % SLOTS]
            written = taken["number"] == numbers + 1
        if everything or written.all():
            self._hole_since = None
            return PendingRows(taken[written], self.drained + len(taken))
        first, now = int(np.argmin(written)), time.monotonic()
        if first or self._hole_since is None:
            self._hole_since = now
        if now - self._hole_since >= HOLE_S:
            return self.pending(everything=True)
        return PendingRows(taken[:first], self.drained + first)

    def release(self, pending: PendingRows) -> None:
        """Free the slots of stored rows."""
        self.lost += pending.upto - self.drained - len(pending.slots)
        self.drained = pending.upto
        if self._final is None:
            self.end = pending.upto + SLOTS - MARGIN

    def layouts(self) -> list[tuple[tuple[str, ...], bool]]:
        """Return keys and `timed` of every layout by its number."""
        return list(self._layouts)

    def stop(self) -> None:
        """Accept no more rows; all claimed ones are `pending` now."""
        self.end = -1
        if self._final is None:
            self._final, _ = self.claim()

    def leave(self) -> None:
        """Detach a forked child from the parent's ring and its lock."""
        self.end = -1
        self._header_used = HEADER_BYTES  # a new layout would be written over the parent's
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None

    def close(self) -> None:
        """Delete the file; a later `put` changes nothing on disk."""
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None
            with contextlib.suppress(OSError):
                self.path.unlink()

    def _new_layout(self, keys: tuple[str, ...], timed: bool) -> RowLayout | None:
        if not all(type(key) is str for key in keys):
            return None
        line = json.dumps({"keys": keys, "timed": timed}).encode() + b"\n"
        with self._layout_lock:
            if (layout := self._layouts.get((keys, timed))) is not None:
                return layout
            begin, end = self._header_used, self._header_used + len(line)
            # Half is reserved for single metrics, which are fewer than combinations.
            capacity = HEADER_BYTES if len(keys) <= 1 else HEADER_BYTES // 2
            if end >= capacity or len(keys) > WIDTH:
                return None
            # In the file before any row that needs it.
            self.memory[begin:end] = line
            self._header_used = end
            pad = 8 * (WIDTH - len(keys))
            pack = struct.Struct(f"<qdq{len(keys)}d{pad}xq").pack_into
            layout = RowLayout(len(self._layouts), pack)
            self._layouts[keys, timed] = layout
            return layout


@dataclass(frozen=True, slots=True)
class OrphanedRows:
    """Unstored slots of a killed process, the number after them, and their layouts."""

    slots: Slots
    end: int
    layouts: list[tuple[tuple[str, ...], bool]]


@contextlib.contextmanager
def abandoned(path: Path) -> Iterator[Callable[[int], OrphanedRows]]:
    """Yield a function from the number of stored rows to the OrphanedRows of a dead process.

    Without locks in the file system, the caller checks the process. Raises RingError if the file is
    no ring or in use, OSError if it cannot be opened.
    """
    with open(open_regular_file(path, writable=True), "rb") as file:  # as NFS requires for locks
        if os.fstat(file.fileno()).st_size != FILE_BYTES:
            raise RingError(f"{path.name}: not a ring of this version.")
        if try_lock(file.fileno()) is False:
            raise RingError(f"{path.name}: in use by another process.")
        yield lambda stored: _unstored_rows(path.name, file.read(FILE_BYTES), stored)


def _unstored_rows(name: str, data: bytes, stored: int) -> OrphanedRows:
    if len(data) != FILE_BYTES or not data.startswith(MAGIC):
        raise RingError(f"{name}: not a ring of this version.")
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
    return OrphanedRows(kept, int(kept["number"][-1]) if len(kept) else stored, layouts)


def _read_layouts(header: bytes) -> list[tuple[tuple[str, ...], bool]]:
    layouts = []
    for line in header.partition(b"\0")[0].splitlines():
        try:
            entry = json.loads(line)
            layouts.append((tuple(map(str, entry["keys"]))[:WIDTH], bool(entry["timed"])))
        except (ValueError, KeyError, TypeError, RecursionError):
            break  # written in part when the process was killed: no row has this layout
    return layouts


def _create_file(path: Path) -> tuple[mmap.mmap, int]:
    """Create, map and lock the file; return the map and the descriptor that holds the lock.

    Raises OSError, and leaves no file then. The lock has its own descriptor, which a forked child
    can close: the map keeps the first descriptor open.
    """
    file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o644)
    try:
        os.posix_fallocate(file, 0, FILE_BYTES)
        memory, lock = mmap.mmap(file, FILE_BYTES), open_regular_file(path, writable=True)
    except OSError:  # such as too many open files
        path.unlink()
        raise
    finally:
        os.close(file)
    with contextlib.suppress(OSError):  # without locks, host and pid identify the owner
        try_lock(lock)
    return memory, lock
