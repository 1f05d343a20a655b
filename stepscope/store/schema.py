"""Tables of a store file, and functions that open an untrusted store."""

from __future__ import annotations

import os
import sqlite3
import stat
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from stepscope.common.files import is_network_filesystem, open_regular_file

SCHEMA_VERSION = 3  # `PRAGMA user_version` of a store; stores of another version are refused.
BUSY_TIMEOUT_S = 5.0


def store_name(rank: int) -> str:
    """Return the name of a rank's store in the run folder; each store has one writer."""
    return f"rank{rank}.sqlite"


STORE_NAME = store_name(0)

TABLES = """
CREATE TABLE series (
    id INTEGER PRIMARY KEY, stream TEXT NOT NULL, source TEXT NOT NULL, UNIQUE (stream, source)
);
CREATE TABLE layouts (id INTEGER PRIMARY KEY, keys TEXT NOT NULL UNIQUE);
CREATE TABLE frames (
    series INTEGER NOT NULL, level INTEGER NOT NULL, first INTEGER NOT NULL, rows INTEGER NOT NULL,
    layout INTEGER NOT NULL, ts_end REAL NOT NULL, step_end REAL NOT NULL, data BLOB NOT NULL
);
CREATE UNIQUE INDEX frames_by_row ON frames (series, level, first);
CREATE INDEX frames_by_ts ON frames (series, ts_end) WHERE level = 0;
CREATE INDEX frames_by_step ON frames (series, step_end) WHERE level = 0;
CREATE TABLE events (
    id INTEGER PRIMARY KEY, ts REAL NOT NULL, step INTEGER NOT NULL, epoch INTEGER NOT NULL,
    kind TEXT NOT NULL, text TEXT NOT NULL, data TEXT NOT NULL
);
CREATE TABLE commands (
    id INTEGER PRIMARY KEY, asked_ts REAL NOT NULL, name TEXT NOT NULL, args TEXT NOT NULL,
    state TEXT NOT NULL DEFAULT 'asked', done_ts REAL, result TEXT
);
CREATE TABLE ring (stored INTEGER NOT NULL);
INSERT INTO ring VALUES (0);
"""

CREATED = sorted(" ".join(text.split()) for text in TABLES.split(";") if "CREATE" in text)
"""SQL of every object of a store."""

MAX_VALUE_BYTES = 64 * 2**20  # Maximum size of a value: a full, inflated frame of 3,000 metrics.
MAX_QUERY_S = 2.0
"""Maximum CPU time of a query, checked every CHECK_EVERY instructions; long runs take 0.1 s."""
CHECK_EVERY = 20_000
MAX_BYTES = {"": 2**40, "-wal": 2**32, "-shm": 2**26, "-journal": 2**32}
"""Maximum file sizes: if checkpoints fail for an hour, the WAL has less than 4 GiB."""
WAL_BYTES = 4 * 2**20
MAX_SERIES = 1000
JOURNAL_MAGIC = bytes.fromhex("d9d505f920a163d7")
NO_WAIT = "PRAGMA synchronous = NORMAL"
"""No commit waits for the disk: a power failure may lose the last commits, a kill none."""


class StoreError(Exception):
    """Unusable store; the message is one sentence with a remedy."""


def create(path: Path) -> sqlite3.Connection:
    """Create a store file and return the writer's connection. Raises StoreError."""
    try:
        path.open("xb").close()  # only one of two processes can create the file
        connection = _connect(path)
        with _closed_on_error(connection):
            connection.execute(NO_WAIT)
            mode = "DELETE" if is_network_filesystem(path) else "WAL"
            connection.execute(f"PRAGMA journal_mode = {mode}")
            # The writer thread makes the checkpoints: automatic ones would slow commits down.
            connection.execute("PRAGMA wal_autocheckpoint = 0")
            # A WAL that grew while a reader was stopped is truncated when it is next reused.
            connection.execute(f"PRAGMA journal_size_limit = {WAL_BYTES}")
            # In one transaction: a reader finds all tables or none.
            script = f"BEGIN;{TABLES}PRAGMA user_version = {SCHEMA_VERSION};COMMIT;"
            connection.executescript(script)
    except (OSError, sqlite3.Error) as error:
        if isinstance(error, sqlite3.Error):
            delete(path)
        text = f"cannot create the store ({error}). Check space and rights."
        raise StoreError(f"{path}: {text}") from error
    return connection


def delete(path: Path) -> None:
    """Delete a closed store; on a full disk its WAL may have stayed."""
    for suffix in MAX_BYTES:
        path.with_name(f"{path.name}{suffix}").unlink(missing_ok=True)


def open_writable(path: Path) -> sqlite3.Connection:
    """Return an autocommit connection to a store that is no link. Raises StoreError."""
    _check_files(path)
    try:
        _check_journal(path.with_name(f"{path.name}-journal"))
        connection = _connect(path)
        with _closed_on_error(connection):
            _check_content(connection, path)
            connection.execute(NO_WAIT)
    except (OSError, sqlite3.Error) as error:
        raise StoreError(f"{path.parent.name}: the store cannot be written ({error}).") from error
    return connection


def open_readonly(path: Path) -> sqlite3.Connection:
    """Return a read-only connection to a store, links followed. Raises StoreError."""
    file = Path(os.path.realpath(path))
    _check_files(file)
    # In a folder without write permission a store in WAL mode opens only as immutable.
    errors = []
    for query in ("mode=ro", "mode=ro&immutable=1"):
        try:
            connection = _connect(f"{file.as_uri()}?{query}", uri=True)
            with _closed_on_error(connection):
                _check_content(connection, path)
            return connection
        except sqlite3.Error as error:
            errors.append(str(error))
    raise StoreError(f"{path.parent.name}: not a readable Stepscope store ({errors[0]}).")


def limit_time(connection: sqlite3.Connection) -> None:
    """Interrupt queries after MAX_QUERY_S of CPU time of this thread."""
    end_s = time.thread_time() + MAX_QUERY_S
    connection.set_progress_handler(lambda: time.thread_time() > end_s, CHECK_EVERY)


def _connect(path: Path | str, *, uri: bool = False) -> sqlite3.Connection:
    return sqlite3.connect(
        path, timeout=BUSY_TIMEOUT_S, isolation_level=None, check_same_thread=False, uri=uri
    )


@contextmanager
def _closed_on_error(connection: sqlite3.Connection) -> Iterator[None]:
    try:
        yield
    except BaseException:
        connection.close()
        raise


def _check_files(path: Path) -> None:
    """Raise StoreError unless the store, its WAL and its journal are regular files."""
    folder = path.parent.name
    for suffix, limit in MAX_BYTES.items():
        name = f"{path.name}{suffix}"
        try:
            status = os.lstat(f"{path}{suffix}")
        except FileNotFoundError as error:
            if suffix:
                continue
            raise StoreError(f"{name}: missing in {folder}. The run recorded nothing.") from error
        except OSError as error:
            raise StoreError(f"{folder}/{name}: cannot be opened ({error.strerror}).") from error
        if not stat.S_ISREG(status.st_mode) or status.st_size > limit:
            text = f"must be a regular file of at most {limit:,} bytes. Restore it from a copy."
            raise StoreError(f"{folder}/{name}: {text}")


def _check_journal(path: Path) -> None:
    """Raise StoreError for a journal that names a file, which SQLite would delete."""
    with suppress(FileNotFoundError), open(open_regular_file(path), "rb") as journal:
        size = os.fstat(journal.fileno()).st_size
        journal.seek(max(0, size - len(JOURNAL_MAGIC)))
        if journal.read(len(JOURNAL_MAGIC)) == JOURNAL_MAGIC and size > len(JOURNAL_MAGIC):
            raise StoreError(f"{path.parent.name}/{path.name}: names another file. Delete it.")


def _check_content(connection: sqlite3.Connection, path: Path) -> None:
    """Raise StoreError for another schema: views, triggers and indexes may run any SQL."""
    connection.setlimit(sqlite3.SQLITE_LIMIT_LENGTH, MAX_VALUE_BYTES)
    limit_time(connection)
    connection.execute("PRAGMA trusted_schema = OFF")
    connection.execute("PRAGMA cell_size_check = ON")
    version = connection.execute("PRAGMA user_version").fetchone()[0]
    if version != SCHEMA_VERSION:
        raise StoreError(
            f"{path.parent.name}: the store has version {version} and this Stepscope reads version "
            f"{SCHEMA_VERSION}. Use the Stepscope that recorded the run."
        )
    # SQLite creates the index of a UNIQUE column without SQL text.
    objects = connection.execute("SELECT name, sql FROM sqlite_master WHERE sql NOT NULL")
    names = {" ".join(str(sql).split()): str(name) for name, sql in objects.fetchall()}
    if sorted(names) != CREATED:
        other = ", ".join(name for sql, name in names.items() if sql not in CREATED)
        raise StoreError(
            f"{path.parent.name}: not a Stepscope store: other tables than those of version "
            f"{version} ({other[:200] or 'some are missing'}). Restore the file from a copy."
        )
    connection.text_factory = lambda text: text.decode(errors="replace")
