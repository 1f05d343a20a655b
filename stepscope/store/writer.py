"""Append rows, events and command results to a store, and roll rows up into buckets."""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Iterator
from contextlib import contextmanager, suppress
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


class StoreWriter:
    """Only writer of a store; a failed transaction may be repeated. Not thread-safe."""

    def __init__(self, path: Path, *, reopen: bool = False) -> None:
        """Create a store, or `reopen` the store of a killed process. Raises StoreError."""
        self._path = path
        self._commits = 0
        self._connection = schema.open_writable(path) if reopen else schema.create(path)
        self._connection.set_progress_handler(None, 0)

    @contextmanager
    def transaction(self) -> Iterator[None]:
        """Commit the appended rows atomically. Raises sqlite3.Error, or StoreError if damaged."""
        try:
            self._connection.execute("BEGIN IMMEDIATE")
            yield
            self._connection.execute("COMMIT")
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
        """Append rows to a series."""
        name = stream, source
        self._connection.execute(
            "INSERT OR IGNORE INTO series (stream, source) VALUES (?, ?)", name
        )
        query = "SELECT id FROM series WHERE stream = ? AND source = ?"
        (series,) = self._connection.execute(query, name).fetchone()
        self._append_level(series, 0, rows)

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

    def _append_level(self, series: int, level: int, rows: SeriesBlock) -> None:
        first, tail = self._unfinished_frame(series, level)
        keys = tuple(dict.fromkeys((*tail.keys, *rows.keys)))  # also of earlier frames
        held = join([tail, rows]).with_keys(keys)
        for start in range(0, len(held), FRAME_ROWS):
            frame = held.slice(start, start + FRAME_ROWS)
            self._insert_frame(series, level, first + start, frame)
        # Each FACTOR complete rows become one bucket of the next level.
        fresh = held.slice(len(tail) - len(tail) % FACTOR, len(held) - len(held) % FACTOR)
        if len(fresh) and level < LEVELS:
            starts = np.arange(0, len(fresh), FACTOR, dtype=np.intp)
            self._append_level(series, level + 1, merge(fresh, starts))

    def _unfinished_frame(self, series: int, level: int) -> tuple[int, SeriesBlock]:
        """Return the newest frame and its first row; its end and no rows if it is full."""
        newest = self._connection.execute(
            "SELECT f.first, f.rows, l.keys, f.data FROM frames f JOIN layouts l "
            "ON l.id = f.layout WHERE f.series = ? AND f.level = ? ORDER BY f.first DESC LIMIT 1",
            (series, level),
        ).fetchone()
        if newest is None:
            return 0, join([])
        try:
            first, rows, keys, data = newest
            block = decode(data, decode_keys(keys), rows, level)
            full = rows - rows % FRAME_ROWS
            return first + full, block.slice(full, rows)
        except (ValueError, TypeError, OverflowError) as error:
            raise StoreError(f"{self._path}: damaged, nothing can be added ({error}).") from error

    def _insert_frame(self, series: int, level: int, first: int, rows: SeriesBlock) -> None:
        keys = json.dumps(rows.keys)
        self._connection.execute("INSERT OR IGNORE INTO layouts (keys) VALUES (?)", (keys,))
        self._connection.execute(
            "INSERT OR REPLACE INTO frames "
            "SELECT ?, ?, ?, ?, id, ?, ?, ? FROM layouts WHERE keys = ? LIMIT 1",
            (
                *(series, level, first, len(rows)),
                *(float(rows.ts[-1]), float(rows.step[-1]), encode(rows, level), keys),
            ),
        )
