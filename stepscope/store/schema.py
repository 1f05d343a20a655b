"""The tables of a store file and the ways to open one."""

from __future__ import annotations

import sqlite3
from pathlib import Path

SCHEMA_VERSION = 3
"""2 added the table `ring`, 3 values that are not finite. Older stores can be read."""
FIRST_WITH_RING = 2
BUSY_TIMEOUT_S = 5.0


def store_name(rank: int) -> str:
    """Return the name of a rank's file in the run folder: each file has one process that writes."""
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

_NETWORK_FILE_SYSTEMS = frozenset(
    ["nfs", "nfs4", "lustre", "cifs", "smb3", "beegfs", "gpfs", "ceph", "9p", "fuse.sshfs", "afs"]
)


class StoreError(Exception):
    """A store that cannot be used; the message is one sentence with a remedy."""


def create(path: Path) -> sqlite3.Connection:
    """Create a store file and return the writer's connection.

    Raises StoreError where the file exists already or cannot be written.
    """
    try:
        path.open("xb").close()  # only one of two processes can create the file
    except FileExistsError as error:
        raise StoreError(
            f"{path.name}: must be new, got an existing file. Start a new run folder."
        ) from error
    except OSError as error:
        raise StoreError(f"{path}: cannot create the store ({error.strerror}).") from error
    connection = None
    try:
        connection = open_writable(path)
        mode = "DELETE" if on_network(path) else "WAL"
        connection.execute(f"PRAGMA journal_mode = {mode}")
        # The writer thread makes the checkpoints: an automatic one would make a commit slower.
        connection.execute("PRAGMA wal_autocheckpoint = 0")
        connection.executescript(TABLES)
        connection.execute(f"PRAGMA user_version = {SCHEMA_VERSION}")
    except sqlite3.Error as error:
        if connection is not None:
            connection.close()
        path.unlink(missing_ok=True)
        raise StoreError(
            f"{path}: cannot create the store ({error}). Check space and rights."
        ) from error
    return connection


def reopen(path: Path) -> sqlite3.Connection:
    """Return a writer's connection to the store of a process that has ended.

    Raises StoreError where it is missing, damaged or of another version.
    """
    open_readonly(path).close()
    try:
        connection = open_writable(path)
        version = connection.execute("PRAGMA user_version").fetchone()[0]
        if FIRST_WITH_RING <= version < SCHEMA_VERSION:
            # What the store has stays readable; rows added now may have the newer form.
            connection.execute(f"PRAGMA user_version = {SCHEMA_VERSION}")
    except sqlite3.Error as error:
        raise StoreError(f"{path}: cannot be written ({error}).") from error
    if version < FIRST_WITH_RING:
        connection.close()
        raise StoreError(f"{path}: version {version} had no ring, so nothing is left to store.")
    return connection


def open_writable(path: Path) -> sqlite3.Connection:
    """Return an autocommit connection; one thread at a time may use it."""
    connection = sqlite3.connect(
        path, timeout=BUSY_TIMEOUT_S, isolation_level=None, check_same_thread=False
    )
    # No commit waits for the disk: a power cut may lose the last ones, a killed process none.
    connection.execute("PRAGMA synchronous = NORMAL")
    return connection


def open_readonly(path: Path) -> sqlite3.Connection:
    """Return a read-only connection to a store of this version.

    Raises StoreError where the file is missing, damaged, foreign or of a newer version.
    """
    if not path.is_file():
        raise StoreError(f"{path.name}: missing in {path.parent.name}. The run recorded nothing.")
    # In a folder without write permission a store in WAL mode opens only as immutable.
    errors = []
    for query in ("mode=ro", "mode=ro&immutable=1"):
        connection = sqlite3.connect(
            f"{path.resolve().as_uri()}?{query}",
            uri=True,
            timeout=BUSY_TIMEOUT_S,
            isolation_level=None,
            check_same_thread=False,
        )
        try:
            version = connection.execute("PRAGMA user_version").fetchone()[0]
            connection.execute("SELECT 1 FROM frames LIMIT 1").fetchall()
        except sqlite3.Error as error:
            connection.close()
            errors.append(str(error))
            continue
        if version > SCHEMA_VERSION:
            connection.close()
            raise StoreError(
                f"{path.parent.name}: store version {version} is newer than this program's "
                f"{SCHEMA_VERSION}. Update Stepscope to open it."
            )
        return connection
    raise StoreError(f"{path.parent.name}: not a readable Stepscope store ({errors[0]}).")


def on_network(path: Path) -> bool:
    """Say whether other machines may see this file as well, some time after it has changed."""
    return _file_system(path) in _NETWORK_FILE_SYSTEMS


def _file_system(path: Path) -> str:
    """Return the type of the file system that holds `path`, "" where /proc does not say."""
    try:
        mounts = [line.split()[1:3] for line in Path("/proc/mounts").read_text().splitlines()]
    except OSError:
        return ""
    folder = str(path.resolve().parent) + "/"
    inside = [
        (len(point), kind) for point, kind in mounts if folder.startswith(point.rstrip("/") + "/")
    ]
    return max(inside, default=(0, ""))[1]
