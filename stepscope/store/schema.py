"""Tables of a store file, and functions that open an untrusted store."""

from __future__ import annotations

import functools
import logging
import os
import sqlite3
import stat
import time
from pathlib import Path

from stepscope.common.files import is_network_filesystem, read_tail

log = logging.getLogger(__name__)

SCHEMA_VERSION = 4  # `PRAGMA user_version` of a store; stores of another version are refused.
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
    state TEXT NOT NULL DEFAULT 'asked'
);
CREATE TABLE ring (stored INTEGER NOT NULL);
INSERT INTO ring VALUES (0);
"""

TABLE_NAMES = frozenset({"series", "layouts", "frames", "events", "commands", "ring"})

MAX_VALUE_BYTES = 64 * 2**20  # Maximum size of a value: a full, inflated frame of 3,000 metrics.
MAX_QUERY_S = 2.0
"""Maximum CPU time of a query, checked every CHECK_EVERY instructions; long runs take 0.1 s."""
CHECK_EVERY = 20_000
MAX_BYTES = {"": 2**40, "-wal": 2**32, "-shm": 2**26, "-journal": 2**32}
"""Maximum file sizes: if checkpoints fail for an hour, the WAL has less than 4 GiB."""
MAX_SERIES = 1000
JOURNAL_MAGIC = bytes.fromhex("d9d505f920a163d7").decode(errors="replace")
"""The last bytes of a journal that names a file, as `read_tail` returns them."""
NO_WAIT = "PRAGMA synchronous = NORMAL"
"""No commit waits for the disk: a power failure may lose the last commits, a kill none."""


class StoreError(Exception):
    """Unusable store; the message is one sentence with a remedy."""


@functools.lru_cache(maxsize=1000)
def warn_once(text: str) -> None:
    """Log a warning once per process: pages read a store every second."""
    log.warning("%s", text)


def create(path: Path) -> sqlite3.Connection:
    """Create a store file and return the writer's connection. Raises StoreError."""
    try:
        path.open("xb").close()  # only one of two processes can create the file
    except OSError as error:
        raise StoreError(f"{path}: cannot create the store ({error}).") from error
    try:
        connection = _connect(path, "rw")
        connection.execute(NO_WAIT)
        mode = "DELETE" if is_network_filesystem(path) else "WAL"
        connection.execute(f"PRAGMA journal_mode = {mode}")
        # In one transaction: a reader finds all tables or none.
        connection.executescript(f"BEGIN;{TABLES}PRAGMA user_version = {SCHEMA_VERSION};COMMIT;")
    except sqlite3.Error as error:
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
    _check_journal(path.with_name(f"{path.name}-journal"))
    connection = _open_untrusted(path, "rw")
    connection.execute(NO_WAIT)
    return connection


def open_readonly(path: Path) -> sqlite3.Connection:
    """Return a read-only connection to a store, links followed. Raises StoreError."""
    file = Path(os.path.realpath(path))
    _check_files(file)
    try:
        return _open_untrusted(file, "ro")
    except StoreError:  # WAL mode in a folder without write permission
        return _open_untrusted(file, "ro&immutable=1")


def limit_time(connection: sqlite3.Connection) -> None:
    """Interrupt queries after MAX_QUERY_S of CPU time of this thread."""
    end_s = time.thread_time() + MAX_QUERY_S
    connection.set_progress_handler(lambda: time.thread_time() > end_s, CHECK_EVERY)


def _connect(path: Path, mode: str) -> sqlite3.Connection:
    return sqlite3.connect(
        f"{path.absolute().as_uri()}?mode={mode}",
        timeout=BUSY_TIMEOUT_S,
        isolation_level=None,
        check_same_thread=False,
        uri=True,
    )


def _open_untrusted(path: Path, mode: str) -> sqlite3.Connection:
    """Return a connection that only uses tables of a store. Raises StoreError."""
    name = path.parent.name
    try:
        connection = _connect(path, mode)
        try:
            connection.setlimit(sqlite3.SQLITE_LIMIT_LENGTH, MAX_VALUE_BYTES)
            limit_time(connection)
            connection.execute("PRAGMA trusted_schema = OFF")
            connection.execute("PRAGMA cell_size_check = ON")
            (version,) = connection.execute("PRAGMA user_version").fetchone()
            connection.set_authorizer(_authorize)
            connection.text_factory = lambda text: text.decode(errors="replace")
            if version == SCHEMA_VERSION:
                return connection
        except BaseException:
            connection.close()
            raise
    except sqlite3.Error as error:
        raise StoreError(f"{name}: not a usable Stepscope store ({error}).") from error
    connection.close()
    raise StoreError(
        f"{name}: the store has version {version} and this Stepscope reads version "
        f"{SCHEMA_VERSION}. Use the Stepscope that recorded the run."
    )


def _authorize(
    action: int, table: str | None, _column: str | None, _database: str | None, source: str | None
) -> int:
    """Allow statements on the tables of a store, and nothing that a view or trigger does."""
    is_allowed = action in _HARMLESS or (action in _ON_TABLES and table in TABLE_NAMES)
    return sqlite3.SQLITE_OK if is_allowed and source is None else sqlite3.SQLITE_DENY


_HARMLESS = (
    sqlite3.SQLITE_SELECT,
    sqlite3.SQLITE_FUNCTION,
    sqlite3.SQLITE_TRANSACTION,
    sqlite3.SQLITE_PRAGMA,
)
_ON_TABLES = (
    sqlite3.SQLITE_READ,
    sqlite3.SQLITE_INSERT,
    sqlite3.SQLITE_UPDATE,
    sqlite3.SQLITE_DELETE,
)


def _check_files(path: Path) -> None:
    """Raise StoreError unless the store, its WAL and its journal are regular files."""
    for suffix, limit in MAX_BYTES.items():
        name = f"{path.parent.name}/{path.name}{suffix}"
        try:
            status = os.lstat(f"{path}{suffix}")
        except FileNotFoundError as error:
            if suffix:
                continue
            raise StoreError(f"{name}: missing. The run recorded nothing.") from error
        except OSError as error:
            raise StoreError(f"{name}: cannot be opened ({error.strerror}).") from error
        if not stat.S_ISREG(status.st_mode) or status.st_size > limit:
            text = f"must be a regular file of at most {limit:,} bytes. Restore it from a copy."
            raise StoreError(f"{name}: {text}")


def _check_journal(path: Path) -> None:
    """Raise StoreError for a journal that names a file, which SQLite would delete."""
    name = f"{path.parent.name}/{path.name}"
    try:
        if read_tail(path, len(JOURNAL_MAGIC)) == JOURNAL_MAGIC:
            raise StoreError(f"{name}: names another file. Delete it.")
    except FileNotFoundError:
        return
    except OSError as error:
        raise StoreError(f"{name}: cannot be opened ({error.strerror}).") from error
