"""Reads a store, live or ended, from any process: a few frames a call, never a whole run."""

from __future__ import annotations

import json
import os
import sqlite3
import time
import zlib
from collections.abc import Iterator
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np

from stepscope.store import schema
from stepscope.store.frames import FACTOR, FRAME_ROWS, Block, decode, join, merge
from stepscope.store.schema import StoreError

Axis = Literal["step", "time"]

EVERY = -1
"""Limit for reading all events: a long run has thousands, few enough to read at once."""


@dataclass(frozen=True, slots=True)
class SeriesInfo:
    """One series: its stream, its source ("" or a GPU's UUID) and the rows it has."""

    id: int
    stream: str
    source: str
    rows: int


@dataclass(frozen=True, slots=True)
class EventRow:
    """One event marker; `ts` in epoch seconds, `data` such as values before and after."""

    id: int
    ts: float
    step: int
    epoch: int
    kind: str
    text: str
    data: dict[str, Any]


class RunReader:
    """A read-only view of one store at one moment, as a context manager.

    All calls inside see the same state, that of one read transaction. Keep it short: while it is
    open the writer's WAL grows. Raises StoreError for a file that cannot be read.
    """

    def __init__(self, folder: Path, rank: int = 0) -> None:
        self._folder = folder
        self._rank = rank

    def __enter__(self) -> RunReader:
        self._connection = schema.open_readonly(self._folder / schema.store_name(self._rank))
        self._connection.execute("BEGIN")
        return self

    def __exit__(self, *exc: object) -> None:
        self._connection.close()

    def __repr__(self) -> str:
        return f"RunReader({self._folder.name!r}, rank={self._rank})"

    def series(self) -> list[SeriesInfo]:
        """Return every series of the run with its row count."""
        with self._reading():
            found = self._connection.execute("SELECT id, stream, source FROM series").fetchall()
            return [SeriesInfo(i, name, source, self._rows(i, 0)) for i, name, source in found]

    def keys(self, series: int) -> tuple[str, ...]:
        """Return every metric of a series, in the order in which they appeared.

        Reads the head of every frame, not its data: about 20 ms per million rows.
        """
        with self._reading():
            rows = self._connection.execute(
                "SELECT keys FROM layouts WHERE id IN "
                "(SELECT DISTINCT layout FROM frames WHERE series = ? AND level = 0) ORDER BY id",
                (series,),
            ).fetchall()
            return tuple(dict.fromkeys(key for (keys,) in rows for key in json.loads(keys)))

    def read(self, series: int, start: int, stop: int, bucket: int) -> Block:
        """Return rows start to stop, grouped in buckets of `bucket` rows aligned to its multiples.

        `bucket` is a power of two. The coarsest level that fits is read as far as it goes, then the
        levels below it for the rest: at most FACTOR rows a bucket, whatever the run's length.
        """
        start -= start % bucket
        level = (bucket.bit_length() - 1) // 4
        parts, firsts = [], []
        with self._reading():
            for number in range(level, -1, -1):
                size = FACTOR**number
                block, first = self._frames(series, number, start // size, stop // size)
                if len(block):
                    parts.append(block)
                    firsts.append((first + np.arange(len(block))) * size)
                    start = int(firsts[-1][-1]) + size
        if not parts:
            return join([])
        buckets = np.concatenate(firsts) // bucket
        starts = np.flatnonzero(np.diff(buckets, prepend=-1)).astype(np.intp)
        return merge(join(parts), starts)

    def rows_between(self, series: int, axis: Axis, low: float, high: float) -> tuple[int, int]:
        """Return the rows [start, stop) whose step, or time in epoch seconds, is in [low, high]."""
        return self._row_at(series, axis, low, "left"), self._row_at(series, axis, high, "right")

    def events(self, after: int = 0, limit: int = 200) -> list[EventRow]:
        """Return the newest `limit` events with an id above `after`, oldest first."""
        with self._reading():
            rows = self._connection.execute(
                "SELECT id, ts, step, epoch, kind, text, data FROM events WHERE id > ? "
                "ORDER BY id DESC LIMIT ?",
                (after, limit),
            ).fetchall()
            return [
                EventRow(i, ts, step, epoch, kind, text, json.loads(data))
                for i, ts, step, epoch, kind, text, data in reversed(rows)
            ]

    def stored_slots(self) -> int:
        """Return how many rows of the ring are in this store."""
        with self._reading():
            return int(self._connection.execute("SELECT stored FROM ring").fetchone()[0])

    def _row_at(self, series: int, axis: Axis, value: float, side: Literal["left", "right"]) -> int:
        column, compare = ("ts_end", "step_end")[axis == "step"], (">=", ">")[side == "right"]
        with self._reading():
            found = self._connection.execute(
                f"SELECT first, rows FROM frames WHERE series = ? AND level = 0 "
                f"AND {column} {compare} ? ORDER BY {column}, first LIMIT 1",
                (series, value),
            ).fetchone()
            if found is None:
                return self._rows(series, 0)
            block, first = self._frames(series, 0, found[0], found[0] + found[1])
        return first + int(np.searchsorted(block.step if axis == "step" else block.ts, value, side))

    def _rows(self, series: int, level: int) -> int:
        found = self._connection.execute(
            "SELECT first + rows FROM frames WHERE series = ? AND level = ? "
            "ORDER BY first DESC LIMIT 1",
            (series, level),
        ).fetchone()
        return int(found[0]) if found else 0

    def _frames(self, series: int, level: int, start: int, stop: int) -> tuple[Block, int]:
        """Return the rows [start, stop) of a level, as far as they exist, and the first's index."""
        if stop <= start:
            return join([]), start
        rows = self._connection.execute(
            "SELECT f.first, f.rows, l.keys, f.data "
            "FROM frames f JOIN layouts l ON l.id = f.layout "
            "WHERE f.series = ? AND f.level = ? AND f.first > ? AND f.first < ? ORDER BY f.first",
            (series, level, start - FRAME_ROWS, stop),
        ).fetchall()
        wanted = [row for row in rows if row[0] + row[1] > start]
        if not wanted:
            return join([]), start
        block = join(
            decode(data, json.loads(keys), count, level) for _, count, keys, data in wanted
        )
        first = int(wanted[0][0])
        begin = max(start, first)
        return block.slice(begin - first, stop - first), begin

    @contextmanager
    def _reading(self) -> Iterator[None]:
        try:
            yield
        except (sqlite3.Error, zlib.error, ValueError) as error:
            raise StoreError(
                f"{self._folder.name}: the store is damaged ({error}). The rest of the run folder "
                "may still be readable; restore the file from a copy."
            ) from error


def new_command_id() -> int:
    """Return an id for `send_command`: microseconds since the epoch, so ids rise with time."""
    return time.time_ns() // 1000


def send_command(
    folder: Path, name: str, args: dict[str, Any], command_id: int | None = None
) -> int:
    """Send a command to the run in `folder`; return the command's id.

    The training process takes it at its next step boundary. Raises StoreError where the store
    cannot be written.
    """
    path = folder / schema.STORE_NAME
    if not path.is_file():
        raise StoreError(f"{folder.name}: has no store, so nothing listens. Start a run first.")
    command_id = command_id or new_command_id()
    try:
        with closing(schema.open_writable(path)) as connection:
            connection.execute(
                "INSERT INTO commands (id, asked_ts, name, args) VALUES (?, ?, ?, ?)",
                (command_id, time.time(), name, json.dumps(args)),
            )
    except sqlite3.Error as error:
        raise StoreError(f"{folder.name}: the command was not stored ({error}).") from error
    with suppress(OSError):
        os.utime(folder)  # wakes the run's writer thread; without it, it looks within half a second
    return command_id
