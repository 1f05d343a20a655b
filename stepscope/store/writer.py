"""Append rows and events to a store, roll rows up into buckets, and end a killed process's run."""

from __future__ import annotations

import json
import logging
import os
import sqlite3
import time
from collections.abc import Collection, Iterator
from contextlib import closing, contextmanager, suppress
from dataclasses import replace
from pathlib import Path

import numpy as np

from stepscope.common.files import is_own_folder
from stepscope.run import RunInfo, RunStatus, is_own, rank_json, write_run_json
from stepscope.run.folder import is_here, recorder_of
from stepscope.run.rank_info import UNREADABLE, find_rank, numbers_with, read_run_json
from stepscope.store import schema
from stepscope.store.blocks import (
    FACTOR,
    FRAME_ROWS,
    STEPS,
    Event,
    SeriesBlock,
    decode,
    decode_keys,
    encode,
    find_broken_losses,
    join,
    merge,
    series_blocks,
)
from stepscope.store.ring import RingError, RingRows, read_ring, rows_after
from stepscope.store.schema import StoreError, store_name, warn_once

log = logging.getLogger(__name__)

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


LIVE = tuple(status for status in RunStatus if status.live)


def recover_ended(run: RunInfo) -> int:
    """Store the last rows of an ended run of this host and user; return the number of steps."""
    if run.status.live or not is_own(run):
        return 0
    gained = 0
    for number in ranks_with_unstored_rows(run):
        try:
            gained += recover(run.folder, number)
        except (RingError, StoreError, OSError, sqlite3.Error) as error:
            warn_once(f"{run.folder}: the last rows could not be stored: {error}")
    return gained


def ranks_with_unstored_rows(run: RunInfo) -> list[int]:
    """Return the ranks whose ring or incomplete transaction is left in the run folder."""
    return list(dict.fromkeys(numbers_with(run.folder, "(?:ring|sqlite-journal)")))


def recover(folder: Path, rank: int = 0) -> int:
    """Move the ring of a dead process into its store and delete it; return the number of steps.

    Rolls back an incomplete transaction. Raises StoreError, RingError, OSError or sqlite3.Error if
    the ring or the store cannot be used.
    """
    path, journal = folder / f"rank{rank}.ring", folder / f"{store_name(rank)}-journal"
    has_ring = os.path.lexists(path)
    if _may_run(folder, rank) or not (has_ring or os.path.lexists(journal)):
        return 0
    data = read_ring(path) if has_ring else None
    with (
        closing(StoreWriter(folder / store_name(rank), reopen=True)) as writer,
        writer.transaction(),  # SQLite rolls an incomplete one back, and others wait
    ):
        if data is None:
            journal.unlink(missing_ok=True)  # SQLite leaves the journal of an unchanged store
            return 0
        steps = writer.append_slots(rows_after(data, writer.stored_slots()))[STEPS]
        for event in find_broken_losses(steps, set()):
            writer.add_event(event)
    path.unlink(missing_ok=True)
    with suppress(*UNREADABLE):
        run_json = read_run_json(folder, rank)
        if run_json.get("problem") is not None:  # rows that did not fit on a full disk
            write_run_json(folder, run_json | {"problem": None}, rank_json(rank))
    return len(steps)


def note_end(
    folder: Path,
    status: RunStatus,
    reason: str,
    *,
    number: int = 0,
    instead_of: Collection[str] = LIVE,
) -> None:
    """Write the outcome of a rank of this user if it has one of the statuses `instead_of`."""
    try:
        run_json = read_run_json(folder, number)
        if run_json["status"] in instead_of and is_own_folder(folder):
            ended = {"status": status, "reason": reason, "ended": time.time()}
            write_run_json(folder, run_json | ended, rank_json(number))
    except UNREADABLE as error:
        text = "stepscope: %s: rank %d: its outcome could not be written: %s"
        log.warning(text, folder.name, number, error)


def _may_run(folder: Path, rank: int) -> bool:
    """Return False if the process of a rank could be seen from here, and has ended the run."""
    info = find_rank(folder, rank)
    if info is None or info.status.live or not is_here(info.run_json):
        return True
    return recorder_of(info.run_json, folder / store_name(rank)) is not None
