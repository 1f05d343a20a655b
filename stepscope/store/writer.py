"""Append rows, events and command results to a store, and roll rows up into buckets."""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
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
    series_blocks,
)
from stepscope.store.ring import RingRows
from stepscope.store.schema import StoreError

LEVELS = 12  # FACTOR**12 rows: more than 2**47
CLOSE_BUSY_MS = 500  # timeout for readers at `close`; the file is complete without them


class StoreWriter:
    """Only writer of a store; a failed transaction may be repeated. Not thread-safe."""

    def __init__(self, path: Path, *, reopen: bool = False) -> None:
        """Create a store, or `reopen` the store of a killed process. Raises StoreError."""
        self._path = path
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

    def append(self, stream: str, source: str, rows: SeriesBlock) -> None:
        """Append rows to a series."""
        name = stream, source
        self._connection.execute(
            "INSERT OR IGNORE INTO series (stream, source) VALUES (?, ?)", name
        )
        query = "SELECT id FROM series WHERE stream = ? AND source = ?"
        (series,) = self._connection.execute(query, name).fetchone()
        self._append_level(series, 0, rows)

    def append_slots(self, rows: RingRows) -> dict[tuple[str, ...], SeriesBlock]:
        """Append rows of the ring, and count them as stored; return them as `series_blocks`."""
        blocks = series_blocks(rows)
        for (stream, source), block in blocks.items():
            if len(block):
                self.append(stream, source, block)
        self._connection.execute("UPDATE ring SET stored = ?", (rows.end,))
        return blocks

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

    def stored_slots(self) -> int:
        """Return the number of ring rows in this store."""
        return int(self._connection.execute("SELECT stored FROM ring").fetchone()[0])

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
        first, newest = self._newest_frame(series, level)
        held = join([newest, rows])  # also the metrics of earlier frames
        # Two threads may record in another order than they took the time.
        ts, step = np.maximum.accumulate(held.ts), np.maximum.accumulate(held.step)
        held = replace(held, ts=ts, step=step)
        for start in range(0, len(held), FRAME_ROWS):
            frame = held.slice(start, start + FRAME_ROWS)
            self._insert_frame(series, level, first + start, frame)
        # Each FACTOR complete rows become one bucket of the next level.
        begin, end = len(newest) - len(newest) % FACTOR, len(held) - len(held) % FACTOR
        if begin < end and level < LEVELS:
            starts = np.arange(0, end - begin, FACTOR, dtype=np.intp)
            self._append_level(series, level + 1, merge(held.slice(begin, end), starts))

    def _newest_frame(self, series: int, level: int) -> tuple[int, SeriesBlock]:
        """Return the first row and the rows of the newest frame."""
        newest = self._connection.execute(
            "SELECT f.first, f.rows, l.keys, f.data FROM frames f JOIN layouts l "
            "ON l.id = f.layout WHERE f.series = ? AND f.level = ? ORDER BY f.first DESC LIMIT 1",
            (series, level),
        ).fetchone()
        if newest is None:
            return 0, join([])
        try:
            first, rows, keys, data = newest
            return int(first), decode(data, decode_keys(keys), rows, level)
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
