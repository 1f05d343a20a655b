"""Append rows, events and command results to a store, and roll rows up into buckets."""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np

from stepscope.store import schema
from stepscope.store.blocks import (
    FACTOR,
    FRAME_ROWS,
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
PART_ROWS = 64
"""Rows at which a small frame is complete: limits frames per read and rows per commit."""
LEVELS = 12  # FACTOR**12 rows: more than 2**47
CLOSE_BUSY_MS = 500  # timeout for readers at `close`; the file is complete without them


@dataclass(slots=True)
class _Level:
    """Unfinished frame of a level, from row `first`; `part` begins its newest small frame."""

    first: int = 0
    part: int = 0
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
        self._series: dict[tuple[str, str], _Series] = {}
        self._layouts: dict[tuple[str, ...], int] = {}
        self._commits = 0
        self.saves_space = False
        self._connection = schema.open_writable(path) if reopen else schema.create(path)
        if reopen:
            try:
                self._load()
                # A transaction also deletes a hot journal.
                self._connection.execute(f"PRAGMA user_version = {schema.SCHEMA_VERSION}")
            except (sqlite3.Error, LookupError, ValueError, TypeError, OverflowError) as error:
                self._connection.close()
                raise StoreError(f"{path}: damaged, nothing can be added ({error}).") from error
            self._connection.set_progress_handler(None, 0)

    @contextmanager
    def transaction(self) -> Iterator[None]:
        """Commit the appended rows atomically. Raises sqlite3.Error."""
        series = {
            name: _Series(old.id, old.keys, [replace(level) for level in old.levels])
            for name, old in self._series.items()
        }
        before = series, dict(self._layouts)
        try:
            self._connection.execute("BEGIN IMMEDIATE")
            yield
            self._connection.execute("COMMIT")
        except BaseException:
            self._series, self._layouts = before
            if self._connection.in_transaction:
                self._connection.execute("ROLLBACK")
            raise
        self._commits += 1
        if self.saves_space:
            self.save_space()
        elif self._commits % CHECKPOINT_COMMITS == 0:
            # PASSIVE waits for no reader. It may fail on a full disk; the commit stays valid.
            with suppress(sqlite3.Error):
                self._connection.execute("PRAGMA wal_checkpoint(PASSIVE)").fetchall()

    def save_space(self) -> None:
        """Empty the WAL now and after each commit, for a full disk. Waits for no reader."""
        self.saves_space = True
        with suppress(sqlite3.Error):  # no space for new pages of the file either
            self._connection.execute("PRAGMA busy_timeout = 0")
            self._connection.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchall()
        self._connection.execute(f"PRAGMA busy_timeout = {schema.BUSY_TIMEOUT_S * 1000:.0f}")

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

    def end_command(self, command_id: int, state: str, ts: float, result: str) -> None:
        """Store the result of a command; `state` is "done" or "refused"."""
        self._connection.execute(
            "UPDATE commands SET state = ?, done_ts = ?, result = ? WHERE id = ?",
            (state, ts, result, command_id),
        )

    def stored_slots(self) -> int:
        """Return the number of ring rows in this store."""
        return int(self._connection.execute("SELECT stored FROM ring").fetchone()[0])

    def store_slots(self, stored: int) -> None:
        """Store the number of ring rows in this store, in the transaction that adds them."""
        self._connection.execute("UPDATE ring SET stored = ?", (stored,))

    def data_version(self) -> int:
        """Return a number that changes after writes of other connections (about 2 µs)."""
        return int(self._connection.execute("PRAGMA data_version").fetchone()[0])

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
        """Load the unfinished frame of every level. Raises sqlite3.Error, ValueError, TypeError."""
        query = self._connection.execute
        for number, text in query("SELECT id, keys FROM layouts").fetchall():
            self._layouts[decode_keys(text)] = number
        found = query("SELECT id, stream, source FROM series").fetchmany(schema.MAX_SERIES)
        for number, stream, source in found:
            series = self._series[stream, source] = _Series(number)
            for level in range(LEVELS):
                newest = query(
                    "SELECT f.first, f.rows, l.keys, f.data FROM frames f JOIN layouts l "
                    "ON l.id = f.layout WHERE f.series = ? AND f.level = ? "
                    "ORDER BY f.first DESC LIMIT ?",
                    (number, level, 2 * FRAME_ROWS // PART_ROWS),
                ).fetchall()
                if not newest:
                    break
                end = int(newest[0][0] + newest[0][1])
                if level == 0:  # a frame has all metrics of earlier frames
                    series.keys = decode_keys(newest[0][2])
                first = end - end % FRAME_ROWS
                tail = join(
                    decode(data, decode_keys(keys), rows, level)
                    for start, rows, keys, data in reversed(newest)
                    if start >= first
                )
                if len(tail) != end - first:
                    raise ValueError(f"row {end - 1} of {stream!s:.100} is not the last")
                series.levels.append(_Level(first, len(tail), tail.with_keys(series.keys)))

    def _append_level(self, series: _Series, number: int, rows: SeriesBlock) -> None:
        if number == len(series.levels):
            series.levels.append(_Level())
        level = series.levels[number]
        before = len(level.tail)
        held = level.tail = join([level.tail, rows]).with_keys(series.keys)
        # Each FACTOR complete rows become one bucket of the next level.
        fresh = held.slice(before - before % FACTOR, len(held) - len(held) % FACTOR)
        self._store_tail(series, number, held, before)
        if len(fresh):
            starts = np.arange(0, len(fresh), FACTOR, dtype=np.intp)
            self._append_level(series, number + 1, merge(fresh, starts))

    def _store_tail(self, series: _Series, number: int, held: SeriesBlock, before: int) -> None:
        """Write the new rows as a frame; extend a newest frame of fewer than PART_ROWS rows."""
        level = series.levels[number]
        full = len(held) - len(held) % FRAME_ROWS
        if full == 0:
            if before - level.part >= PART_ROWS:
                level.part = before
            rows = held.slice(level.part, len(held))
            self._insert(series, number, level.first + level.part, rows)
            return
        self._connection.execute(
            "DELETE FROM frames WHERE series = ? AND level = ? AND first >= ?",
            (series.id, number, level.first),
        )
        for start in range(0, len(held), FRAME_ROWS):
            self._insert(series, number, level.first + start, held.slice(start, start + FRAME_ROWS))
        level.first += full
        level.tail, level.part = held.slice(full, len(held)), 0

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
