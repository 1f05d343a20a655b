"""Read a store, live or ended, from any process: a few frames per call."""

from __future__ import annotations

import itertools
import json
import logging
import os
import sqlite3
import time
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from stepscope.common.files import MAX_JSON_DEPTH, is_deeper
from stepscope.store import schema
from stepscope.store.blocks import (
    FACTOR,
    FRAME_ROWS,
    MAX_STEP,
    MAX_TIME_S,
    Event,
    SeriesBlock,
    decode,
    decode_keys,
    join,
    merge,
)
from stepscope.store.schema import StoreError

log = logging.getLogger(__name__)

Axis = Literal["step", "time"]

EVERY = -1  # limit for reading all events
MAX_ROWS = 2**40
MAX_HELD_VALUES = 2**20
"""Number of values at which a read merges rows into buckets, before it decodes more."""
MAX_EVENT_LENGTH, MAX_EVENTS_LENGTH = 2**20, 2**25
"""Maximum number of characters in one text of an event, and in all events of one call."""

_logged: set[tuple[Path, int, str]] = set()


@dataclass(frozen=True, slots=True)
class SeriesInfo:
    """Series: its stream, its source ("" or a GPU's UUID) and its number of rows."""

    id: int
    stream: str
    source: str
    rows: int


@dataclass(frozen=True, slots=True)
class EventRow(Event):
    id: int


class StoreReader:
    """Context manager of one read transaction of a store. Raises StoreError if unreadable.

    Keep the transaction short: while it is open, the writer's WAL grows.
    """

    def __init__(self, folder: Path, rank: int = 0) -> None:
        self._folder = folder
        self._rank = rank

    def __enter__(self) -> StoreReader:
        self._connection = schema.open_readonly(self._folder / schema.store_name(self._rank))
        self._connection.execute("BEGIN")
        return self

    def __exit__(self, *exc: object) -> None:
        self._connection.close()

    def series(self) -> list[SeriesInfo]:
        """Return every series of the run with its row count."""
        with self._reading():
            found = self._connection.execute("SELECT id, stream, source FROM series")
            return [
                SeriesInfo(number, stream, source, self._rows(number))
                for number, stream, source in found.fetchmany(schema.MAX_SERIES)
                if _is_text(stream, 100) and _is_text(source, 100)
            ]

    def keys(self, series: int) -> tuple[str, ...]:
        """Return every metric of a series in order of appearance."""
        with self._reading():
            # A frame has all metrics of earlier frames.
            newest = self._connection.execute(
                "SELECT l.keys FROM frames f JOIN layouts l ON l.id = f.layout "
                "WHERE f.series = ? AND f.level = 0 ORDER BY f.first DESC",
                (series,),
            )
            for (keys,) in newest:
                with suppress(ValueError):
                    return decode_keys(keys)
                self._log_omitted("a layout")
            return ()

    def read(self, series: int, start: int, stop: int, bucket: int) -> SeriesBlock:
        """Return rows [start, stop) in buckets of `bucket` rows (a power of two), aligned.

        The coarsest level that fits is read first, then the levels below it for the rest: at most
        FACTOR rows a bucket.
        """
        start -= start % bucket
        level = (bucket.bit_length() - 1) // 4
        parts: list[SeriesBlock] = []
        buckets: list[NDArray[np.intp]] = []
        rows = width = 0
        with self._reading():
            for number in range(level, -1, -1):
                size = FACTOR**number
                for block, first in self._blocks(series, number, start // size, stop // size):
                    rows, width = rows + len(block), max(width, len(block.keys))
                    if size < bucket and parts and rows * width > MAX_HELD_VALUES:
                        merged, numbers = _grouped(parts, buckets)
                        parts, buckets = [merged], [numbers]
                        rows, width = len(merged) + len(block), max(width, len(merged.keys))
                    parts.append(block)
                    buckets.append((first + np.arange(len(block))) * size // bucket)
                    start = (first + len(block)) * size
        return _grouped(parts, buckets)[0]

    def rows_between(self, series: int, axis: Axis, low: float, high: float) -> tuple[int, int]:
        """Return the rows [start, stop) whose step, or time in epoch seconds, is in [low, high]."""
        return self._row_at(series, axis, low, "left"), self._row_at(series, axis, high, "right")

    def events(
        self, after: int = 0, limit: int = 200, *, kind: str | None = None
    ) -> list[EventRow]:
        """Return the newest `limit` events with an id above `after`, oldest first.

        With `kind`, only of that kind. Omits damaged ones, and the oldest beyond MAX_EVENTS_LENGTH.
        """
        newest = (
            "SELECT id, ts, step, epoch, kind, text, data FROM events WHERE id > ?1 "
            "AND (?3 IS NULL OR kind = ?3) ORDER BY id DESC LIMIT ?2"
        )
        events, left = list[EventRow](), MAX_EVENTS_LENGTH
        with self._reading():
            try:
                for row in self._connection.execute(newest, (after, limit, kind)):
                    event = _event(*row)
                    if event is None:
                        self._log_omitted("an event")
                        continue
                    left -= len(event.text) + len(row[-1])
                    if left < 0:
                        self._log_omitted("older events")
                        break
                    events.append(event)
            except (sqlite3.DataError, sqlite3.OperationalError) as error:
                if error.sqlite_errorcode not in (sqlite3.SQLITE_TOOBIG, sqlite3.SQLITE_INTERRUPT):
                    raise
                self._log_omitted("older events")
        return events[::-1]

    def stored_slots(self) -> int:
        """Return the number of ring rows in this store."""
        with self._reading():
            (stored,) = self._connection.execute("SELECT stored FROM ring").fetchone()
            return int(stored)

    def _row_at(self, series: int, axis: Axis, value: float, side: Literal["left", "right"]) -> int:
        column, compare = ("ts_end", "step_end")[axis == "step"], (">=", ">")[side == "right"]
        with self._reading():
            found = self._connection.execute(
                f"SELECT first, rows FROM frames WHERE series = ? AND level = 0 "
                f"AND {column} {compare} ? ORDER BY {column}, first LIMIT 1",
                (series, value),
            ).fetchone()
            if found is None:
                return self._rows(series)
            first, rows = int(found[0]), int(found[1])
            block = join(block for block, _ in self._blocks(series, 0, first, first + rows))
        return first + int(np.searchsorted(block.step if axis == "step" else block.ts, value, side))

    def _rows(self, series: int) -> int:
        found = self._connection.execute(
            "SELECT first + rows FROM frames WHERE series = ? AND level = 0 "
            f"AND first BETWEEN 0 AND {MAX_ROWS} AND rows BETWEEN 1 AND {FRAME_ROWS} "
            "ORDER BY first DESC LIMIT 1",
            (series,),
        ).fetchone()
        return int(found[0]) if found else 0

    def _blocks(
        self, series: int, level: int, start: int, stop: int
    ) -> Iterator[tuple[SeriesBlock, int]]:
        """Yield a level's rows by frame with the first index; damaged values are missing."""
        if stop <= start:
            return
        rows = self._connection.execute(
            "SELECT f.first, f.rows, f.ts_end, f.step_end, l.keys, "
            "CASE WHEN typeof(f.data) = 'blob' AND length(f.data) <= ? THEN f.data END "
            "FROM frames f LEFT JOIN layouts l ON l.id = f.layout "
            "WHERE f.series = ? AND f.level = ? AND f.first > ? AND f.first < ? "
            "AND f.first + f.rows > ? "
            f"AND f.rows BETWEEN 1 AND {FRAME_ROWS} ORDER BY f.first",
            (schema.MAX_VALUE_BYTES, series, level, start - FRAME_ROWS, stop, start),
        )
        end = 0
        for first, count, ts, step, keys, data in rows:
            if not (type(first) is type(count) is int and first >= end and first + count > start):
                continue
            end = first + count
            try:
                block = decode(data, decode_keys(keys), count, level)
            except ValueError:
                self._log_omitted("rows")
                if not (_is_within(ts, MAX_TIME_S) and _is_within(step, MAX_STEP)):
                    continue
                times, steps, none = np.full(count, ts), np.full(count, step), np.empty((0, count))
                block = SeriesBlock.raw((), times, steps, none)
            begin = max(start, first)
            yield block.slice(begin - first, stop - first), begin

    def _log_omitted(self, what: str) -> None:
        """Log once per store that `what` is omitted."""
        key = self._folder, self._rank, what
        if key not in _logged:
            _logged.add(key)
            name = f"{self._folder.name}/{schema.store_name(self._rank)}"
            log.warning("%s: %s omitted: damaged or too large", name, what)

    @contextmanager
    def _reading(self) -> Iterator[None]:
        schema.limit_time(self._connection)
        try:
            yield
        except (sqlite3.Error, ValueError, TypeError, OverflowError) as error:
            rest = "The rest of the run folder may still be readable; restore the file from a copy."
            text = f"{self._folder.name}: the store is damaged ({error}). {rest}"
            raise StoreError(text) from error


def _grouped(
    parts: list[SeriesBlock], buckets: list[NDArray[np.intp]]
) -> tuple[SeriesBlock, NDArray[np.intp]]:
    """Return a block with one row per bucket, and the bucket numbers."""
    if not parts:
        return join([]), np.empty(0, np.intp)
    numbers = np.concatenate(buckets)
    is_start = np.ones(len(numbers), dtype=bool)
    np.not_equal(numbers[1:], numbers[:-1], out=is_start[1:])
    starts = np.flatnonzero(is_start)
    return merge(join(parts), starts), numbers[starts]


def _is_text(value: object, length: int) -> bool:
    return isinstance(value, str) and len(value) <= length


def _is_within(value: object, limit: float) -> bool:
    return isinstance(value, int | float) and abs(value) <= limit


def _event(
    number: int, ts: Any, step: Any, epoch: Any, kind: Any, text: Any, data: Any
) -> EventRow | None:
    """Return an event; None for a damaged row."""
    texts = _is_text(kind, 100) and _is_text(text, MAX_EVENT_LENGTH)
    if not (texts and _is_within(ts, MAX_TIME_S) and type(step) is type(epoch) is int):
        return None
    try:
        parsed = json.loads(data) if _is_text(data, MAX_EVENT_LENGTH) else None
    except (ValueError, RecursionError):
        return None
    if not isinstance(parsed, dict) or is_deeper(parsed, MAX_JSON_DEPTH):
        return None
    return EventRow(ts, step, epoch, kind, text, parsed, id=number)


def send_command(
    folder: Path, name: str, args: dict[str, Any], command_id: int | None = None
) -> int:
    """Submit a command for the run's next step boundary; return its id. Raises StoreError."""
    command_id = command_id or time.time_ns() // 1000  # ids rise with time
    try:
        with closing(schema.open_writable(folder / schema.STORE_NAME)) as connection:
            connection.execute(
                "INSERT INTO commands (id, asked_ts, name, args) VALUES (?, ?, ?, ?)",
                (command_id, time.time(), name, json.dumps(args)),
            )
    except sqlite3.Error as error:
        raise StoreError(f"{folder.name}: the command was not stored ({error}).") from error
    with suppress(OSError):
        os.utime(folder)  # wakes the run's writer thread, which polls twice a second without it
    return command_id


SLICE_ROWS, SLICE_VALUES = 64 * FRAME_ROWS, 2**21  # maximum rows and values of a slice


class StreamRows:
    """Present rows of a stream. `keys` are its metrics, `sources` "" or UUIDs of GPUs."""

    def __init__(self, folder: Path, stream: str, rank: int) -> None:
        self.folder, self.stream, self._rank = folder, stream, rank
        with StoreReader(folder, rank) as reader:
            self._series = [series for series in reader.series() if series.stream == stream]
            keys = (reader.keys(series.id) for series in self._series)
            self.keys = tuple(dict.fromkeys(itertools.chain.from_iterable(keys)))
        self.sources = tuple(series.source for series in self._series)

    def __len__(self) -> int:
        return sum(series.rows for series in self._series)

    def slices(
        self, keys: Sequence[str] | None = None, source: str | None = None
    ) -> Iterator[tuple[str, SeriesBlock]]:
        """Yield (source, rows) in slices; None means all keys, or all sources."""
        rows = min(SLICE_ROWS, max(FRAME_ROWS, SLICE_VALUES // (len(self.keys) + 1)))
        rows -= rows % FRAME_ROWS
        for series in self._series:
            start = 0
            while source in (None, series.source) and start < series.rows:
                with StoreReader(self.folder, self._rank) as reader:
                    block = reader.read(series.id, start, min(start + rows, series.rows), 1)
                if not len(block):
                    text = f"the store is damaged (no row {start}). Restore the file from a copy."
                    raise StoreError(f"{self.folder.name}: {text}")
                yield series.source, block.with_keys(self.keys if keys is None else keys)
                start += len(block)
