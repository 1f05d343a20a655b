"""Read a store, live or ended, from any process: a few frames per call."""

from __future__ import annotations

import itertools
import json
import os
import sqlite3
import time
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

import msgspec
import numpy as np
from numpy.typing import NDArray

from stepscope.common.json_values import parse_json
from stepscope.store import schema
from stepscope.store.blocks import (
    FACTOR,
    FRAME_ROWS,
    MAX_TIME_S,
    Event,
    SeriesBlock,
    decode,
    decode_keys,
    join,
    merge,
)
from stepscope.store.schema import StoreError

Axis = Literal["step", "time"]

EVERY = -1  # limit for reading all events
MAX_ROWS = 2**40
MAX_EVENT_LENGTH = 2**20  # characters of one text of an event
MAX_EVENTS_LENGTH = 2**25  # characters of all events of one call
_Name = Annotated[str, msgspec.Meta(max_length=100)]
_Text = Annotated[str, msgspec.Meta(max_length=MAX_EVENT_LENGTH)]
_Time = Annotated[float, msgspec.Meta(ge=-MAX_TIME_S, le=MAX_TIME_S)]
_SERIES_ROWS = list[tuple[int, _Name, _Name]]
_EVENT_ROW = tuple[int, _Time, int, int, _Name, _Text, _Text]


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
            query = self._connection.execute("SELECT id, stream, source FROM series")
            found = msgspec.convert(query.fetchmany(schema.MAX_SERIES), _SERIES_ROWS)
            return [
                SeriesInfo(number, stream, source, self._rows(number))
                for number, stream, source in found
            ]

    def find(self, stream: str, source: str = "") -> SeriesInfo:
        """Return a series; one without rows if the run does not have it."""
        found = (info for info in self.series() if (info.stream, info.source) == (stream, source))
        return next(found, SeriesInfo(0, stream, source, 0))

    def keys(self, series: int) -> tuple[str, ...]:
        """Return every metric of a series in order of appearance."""
        with self._reading():
            # A frame has all metrics of earlier frames.
            newest = self._connection.execute(
                "SELECT l.keys FROM frames f JOIN layouts l ON l.id = f.layout "
                "WHERE f.series = ? AND f.level = 0 ORDER BY f.first DESC LIMIT 1",
                (series,),
            ).fetchone()
            return decode_keys(newest[0]) if newest else ()

    def read(self, series: int, start: int, stop: int, bucket: int) -> SeriesBlock:
        """Return rows [start, stop) in buckets of `bucket` rows (a power of two), aligned.

        The coarsest level that fits is read first, then the levels below it for the rest: at most
        FACTOR rows a bucket.
        """
        start -= start % bucket
        level = (bucket.bit_length() - 1) // 4
        parts: list[SeriesBlock] = []
        numbers = [np.empty(0, np.intp)]
        with self._reading():
            for number in range(level, -1, -1):
                size = FACTOR**number
                for block, first in self._blocks(series, number, start // size, stop // size):
                    of_rows = (first + np.arange(len(block))) * size // bucket
                    # Frame by frame, since the rows of 3,000 metrics take much memory.
                    part, of_part = _grouped(block, of_rows)
                    parts.append(part)
                    numbers.append(of_part)
                    start = (first + len(block)) * size
        return _grouped(join(parts), np.concatenate(numbers))[0]

    def rows_between(self, series: int, axis: Axis, low: float, high: float) -> tuple[int, int]:
        """Return the rows [start, stop) whose step, or time in epoch seconds, is in [low, high]."""
        return self._row_at(series, axis, low, "left"), self._row_at(series, axis, high, "right")

    def events(
        self,
        after: int = 0,
        limit: int = 200,
        *,
        kind: str | None = None,
        without: Sequence[str] = (),
    ) -> list[EventRow]:
        """Return the newest `limit` events with an id above `after`, oldest first.

        With `kind`, only events of that kind; never those of the kinds `without`. Omits damaged
        events, and the oldest events beyond MAX_EVENTS_LENGTH characters.
        """
        newest = (
            "SELECT id, ts, step, epoch, kind, text, data FROM events WHERE id > ?1 "
            "AND (?3 IS NULL OR kind = ?3) AND instr(?4, ',' || kind || ',') = 0 "
            "ORDER BY id DESC LIMIT ?2"
        )
        events, left, left_out = list[EventRow](), MAX_EVENTS_LENGTH, f",{','.join(without)},"
        with self._reading():
            for row in self._connection.execute(newest, (after, limit, kind, left_out)):
                try:
                    event = _event(row)
                except ValueError:
                    self._log_omitted("an event")
                    continue
                left -= len(event.text) + len(row[-1])
                if left < 0:
                    self._log_omitted("older events")
                    break
                events.append(event)
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
        """Yield a level's rows by frame with the first index; omits damaged frames."""
        if stop <= start:
            return
        rows = self._connection.execute(
            "SELECT f.first, f.rows, l.keys, f.data "
            "FROM frames f LEFT JOIN layouts l ON l.id = f.layout "
            "WHERE f.series = ? AND f.level = ? AND f.first > ? AND f.first < ? ORDER BY f.first",
            (series, level, start - FRAME_ROWS, stop),
        )
        end = start
        for first, count, keys, data in rows:
            try:
                block = decode(data, decode_keys(keys), count, level)
            except (ValueError, TypeError):
                self._log_omitted("rows")
                continue
            if type(first) is int and end < first + count and end <= max(start, first):
                end = first + count
                begin = max(start, first)
                yield block.slice(begin - first, stop - first), begin

    def _log_omitted(self, what: str) -> None:
        path = self._folder / schema.store_name(self._rank)
        schema.warn_once(f"{path}: {what} omitted: damaged or too large")

    @contextmanager
    def _reading(self) -> Iterator[None]:
        schema.limit_time(self._connection)
        try:
            yield
        except (sqlite3.Error, ValueError, TypeError, OverflowError) as error:
            rest = "The rest of the run folder may still be readable; restore the file from a copy."
            text = f"{self._folder.name}: the store is damaged ({error}). {rest}"
            raise StoreError(text) from error


def _grouped(block: SeriesBlock, numbers: NDArray[np.intp]) -> tuple[SeriesBlock, NDArray[np.intp]]:
    """Merge successive rows with the same bucket number; return also the bucket numbers."""
    starts = np.flatnonzero(np.diff(numbers, prepend=-1))
    return merge(block, starts), numbers[starts]


def _event(row: tuple[Any, ...]) -> EventRow:
    """Return the event of a row. Raises ValueError for a damaged row."""
    number, ts, step, epoch, kind, text, data = msgspec.convert(row, _EVENT_ROW)
    return EventRow(ts, step, epoch, kind, text, msgspec.convert(parse_json(data), dict), id=number)


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


SLICE_ROWS = 4 * FRAME_ROWS  # 100 MB of 3,000 metrics


class StreamRows:
    """Present rows of a stream. `keys` are its metrics, `sources` "" or UUIDs of GPUs.

    `stored_slots` is the number of rows of the ring that the store has.
    """

    def __init__(self, folder: Path, stream: str, rank: int) -> None:
        self.folder, self.stream, self._rank = folder, stream, rank
        with StoreReader(folder, rank) as reader:
            self._series = [series for series in reader.series() if series.stream == stream]
            keys = (reader.keys(series.id) for series in self._series)
            self.keys = tuple(dict.fromkeys(itertools.chain.from_iterable(keys)))
            self.stored_slots = reader.stored_slots()
        self.sources = tuple(series.source for series in self._series)

    def __len__(self) -> int:
        return sum(series.rows for series in self._series)

    def slices(
        self, keys: Sequence[str] | None = None, source: str | None = None
    ) -> Iterator[tuple[str, SeriesBlock]]:
        """Yield (source, rows) in slices; None means all keys, or all sources."""
        with StoreReader(self.folder, self._rank) as reader:
            for series in self._series:
                if source not in (None, series.source):
                    continue
                for start in range(0, series.rows, SLICE_ROWS):
                    block = reader.read(series.id, start, min(start + SLICE_ROWS, series.rows), 1)
                    yield series.source, block.with_keys(self.keys if keys is None else keys)
