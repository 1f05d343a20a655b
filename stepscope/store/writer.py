"""Append rows, events and command results to a store, and roll rows up into buckets."""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from stepscope.store import schema
from stepscope.store.blocks import (
    FACTOR,
    FRAME_ROWS,
    CommandResult,
    Event,
    SeriesBlock,
    decode,
    decode_keys,
    encode,
    join,
    merge,
)
from stepscope.store.schema import StoreError

CHECKPOINT_COMMITS = 20
LEVELS = 12  # FACTOR**12 rows: more than 2**47
CLOSE_BUSY_MS = 500  # timeout for readers at `close`; the file is complete without them


@dataclass(slots=True)
class _Level:
    """Unfinished frame of a level, from row `first`."""

    first: int = 0
    tail: SeriesBlock = field(default_factory=lambda: join([]))


@dataclass(slots=True)
class _Series:
    id: int
    keys: tuple[str, ...] = ()
    levels: list[_Level] = field(default_factory=list)


class StoreWriter:
    """Only writer of a store; a failed transaction may be repeated. Not thread-safe."""

    def __init__(self, path: Path, *, reopen: bool = False) -> None:
        """Create a store, or `reopen` the store of a killed process. Raises StoreError."""
        self._path = path
        self._series: dict[tuple[str, str], _Series] = {}
        self._layouts: dict[tuple[str, ...], int] = {}
        self._commits = 0
        self._is_loaded = not reopen
        self._connection = schema.open_writable(path) if reopen else schema.create(path)

    @contextmanager
    def transaction(self) -> Iterator[None]:
        """Commit the appended rows atomically. Raises sqlite3.Error, or StoreError if damaged."""
        try:
            self._connection.execute("BEGIN IMMEDIATE")
            if not self._is_loaded:
                self._load()
            self._is_loaded = False  # until the commit
            yield
            self._connection.execute("COMMIT")
            self._is_loaded = True
        except BaseException:
            if self._connection.in_transaction:
                self._connection.execute("ROLLBACK")
            raise
        self._commits += 1
        if self._commits % CHECKPOINT_COMMITS == 0:
            # PASSIVE waits for no reader. It may fail on a full disk; the commit stays valid.
            with suppress(sqlite3.Error):
                self._connection.execute("PRAGMA wal_checkpoint(PASSIVE)").fetchall()

    def append(self, stream: str, source: str, rows: SeriesBlock) -> None:
        series = self._series.get((stream, source)) or self._add_series(stream, source)
        series.keys = tuple(dict.fromkeys((*series.keys, *rows.keys)))
        self._append_level(series, 0, rows.with_keys(series.keys))

    def add_event(self, event: Event) -> None:
        """Append one event; its `data` must be JSON."""
        self._connection.execute(
            "INSERT INTO events (ts, step, epoch, kind, text, data) VALUES (?, ?, ?, ?, ?, ?)",
            (event.ts, event.step, event.epoch, event.kind, event.text, json.dumps(event.data)),
        )

    def take_commands(self) -> list[tuple[int, str, str]]:
        """Return commands sent since the last call, oldest first, as (id, name, args JSON)."""
        rows = self._connection.execute(
            "SELECT id, name, args FROM commands WHERE state = 'asked' ORDER BY id"
        ).fetchall()
        if rows:
            ids = ",".join(str(row[0]) for row in rows)
            self._connection.execute(f"UPDATE commands SET state = 'taken' WHERE id IN ({ids})")
        return rows

    def end_command(self, ended: CommandResult) -> None:
        """Store the result of a command."""
        self._connection.execute(
            "UPDATE commands SET state = ?, done_ts = ?, result = ? WHERE id = ?",
            (ended.state, ended.ts, ended.result, ended.command_id),
        )

    def stored_slots(self) -> int:
        """Return the number of ring rows in this store."""
        return int(self._connection.execute("SELECT stored FROM ring").fetchone()[0])

    def store_slots(self, stored: int) -> None:
        """Store the number of ring rows in this store, in the transaction that adds them."""
        self._connection.execute("UPDATE ring SET stored = ?", (stored,))

    def close(self) -> None:
        """Merge the WAL into the file, so that the folder can be copied, and close."""
        try:
            self._connection.execute(f"PRAGMA busy_timeout = {CLOSE_BUSY_MS}")
            self._connection.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchall()
            self._connection.execute("PRAGMA journal_mode = DELETE").fetchall()
        except sqlite3.OperationalError:
            pass  # a reader has the file open: it stays in WAL mode, which every reader can open
        finally:
            self._connection.close()

    def _load(self) -> None:
        """Load the unfinished frame of every level. Raises sqlite3.Error, or StoreError."""
        query = self._connection.execute
        self._series, self._layouts = {}, {}
        try:
            for number, text in query("SELECT id, keys FROM layouts").fetchall():
                self._layouts[decode_keys(text)] = number
            found = query("SELECT id, stream, source FROM series").fetchmany(schema.MAX_SERIES)
            for number, stream, source in found:
                series = self._series[stream, source] = _Series(number)
                while len(series.levels) < LEVELS and self._load_level(series):
                    pass
        except (LookupError, ValueError, TypeError, OverflowError) as error:
            raise StoreError(f"{self._path}: damaged, nothing can be added ({error}).") from error
        self._connection.set_progress_handler(None, 0)

    def _load_level(self, series: _Series) -> bool:
        """Load the next level of a series; return False if it has no rows."""
        newest = self._connection.execute(
            "SELECT f.first, f.rows, l.keys, f.data FROM frames f JOIN layouts l "
            "ON l.id = f.layout WHERE f.series = ? AND f.level = ? ORDER BY f.first DESC LIMIT 1",
            (series.id, len(series.levels)),
        ).fetchone()
        if newest is None:
            return False
        first, rows, text, data = newest
        keys = decode_keys(text)
        if not series.levels:  # a frame has all metrics of earlier frames
            series.keys = keys
        tail = decode(data, keys, rows, len(series.levels)).with_keys(series.keys)
        if first % FRAME_ROWS:
            raise ValueError(f"row {first} begins no frame")
        full = rows == FRAME_ROWS
        series.levels.append(_Level(first + rows, join([])) if full else _Level(first, tail))
        return True

    def _append_level(self, series: _Series, number: int, rows: SeriesBlock) -> None:
        if number == len(series.levels):
            series.levels.append(_Level())
        level = series.levels[number]
        before = len(level.tail)
        held = join([level.tail, rows]).with_keys(series.keys)
        for start in range(0, len(held), FRAME_ROWS):
            frame = held.slice(start, start + FRAME_ROWS)
            self._insert(series, number, level.first + start, frame)
        full = len(held) - len(held) % FRAME_ROWS
        level.first += full
        level.tail = held.slice(full, len(held))
        # Each FACTOR complete rows become one bucket of the next level.
        fresh = held.slice(before - before % FACTOR, len(held) - len(held) % FACTOR)
        if len(fresh):
            starts = np.arange(0, len(fresh), FACTOR, dtype=np.intp)
            self._append_level(series, number + 1, merge(fresh, starts))

    def _insert(self, series: _Series, number: int, first: int, rows: SeriesBlock) -> None:
        end = float(rows.ts[-1]), float(rows.step[-1])
        values = series.id, number, first, len(rows), self._layout(rows.keys), *end
        statement = "INSERT OR REPLACE INTO frames VALUES (?, ?, ?, ?, ?, ?, ?, ?)"
        self._connection.execute(statement, (*values, encode(rows, number)))

    def _add_series(self, stream: str, source: str) -> _Series:
        series = self._series[stream, source] = _Series(len(self._series) + 1)
        self._connection.execute("INSERT INTO series VALUES (?, ?, ?)", (series.id, stream, source))
        return series

    def _layout(self, keys: tuple[str, ...]) -> int:
        if keys not in self._layouts:
            self._layouts[keys] = len(self._layouts) + 1
            self._connection.execute(
                "INSERT INTO layouts VALUES (?, ?)", (self._layouts[keys], json.dumps(keys))
            )
        return self._layouts[keys]
