"""The local copy of the runs of another host. Nothing that it sends is written outside of it."""

from __future__ import annotations

import json
import logging
import os
import shutil
import sqlite3
import time
from collections.abc import Collection, Iterable
from contextlib import closing, suppress
from pathlib import Path
from typing import Annotated, Any

import msgspec

from stepscope.common.files import atomic_write, open_for_append, try_lock
from stepscope.common.formatting import printable
from stepscope.remote import far_reader
from stepscope.remote.access import CONTACT
from stepscope.run import RUN_JSON, is_run_id
from stepscope.store import STORE_NAME, StoreError, schema
from stepscope.store.blocks import FRAME_ROWS
from stepscope.store.writer import LEVELS

log = logging.getLogger(__name__)

UNDELIVERED_S = 30.0  # age from which a command is no longer sent
MAX_BYTES = 5 * 10**9
LOCK = ".lock"
Command = tuple[str, int, str, str]  # run, id, name, and arguments as JSON

_Count = Annotated[int, msgspec.Meta(ge=0, le=2**53)]
_Level = Annotated[int, msgspec.Meta(ge=0, le=LEVELS)]
_Rows = Annotated[int, msgspec.Meta(ge=1, le=FRAME_ROWS)]
_Name = Annotated[str, msgspec.Meta(max_length=120)]


class FarFacts(msgspec.Struct):
    """What only the other host knows of a run: its heartbeat's age, its process, its rights."""

    live: bool
    age_s: Annotated[float, msgspec.Meta(ge=0, le=1e9)]
    alive: bool | None
    reason: Annotated[str, msgspec.Meta(max_length=300)] | None


class FarFile(msgspec.Struct):
    """A whole file, or with `offset` the next bytes of a file that grows."""

    name: _Name
    data: bytes
    offset: _Count | None = None
    facts: FarFacts | None = None


class FarStore(msgspec.Struct):
    """New rows of a store, in the order of the columns of its tables; frames with their rowid."""

    version: int
    series: list[tuple[_Count, str, str]] = []
    layouts: list[tuple[_Count, str]] = []
    events: list[tuple[_Count, float, int, int, str, str, str]] = []
    frames: list[tuple[_Count, _Count, _Level, _Count, _Rows, _Count, float, float, bytes]] = []


class FarRun(msgspec.Struct):
    """What is new in the folder of a run, and with `names` its present small files."""

    names: list[_Name] | None = None
    files: list[FarFile] = []
    stores: dict[str, FarStore] = {}
    error: str | None = None


class Answer(msgspec.Struct):
    """An answer of `far_reader`; `found` has JSON of each run, so that one may be invalid."""

    error: str | None = None
    now: float = 0.0
    runs: Annotated[list[_Name], msgspec.Meta(max_length=far_reader.MAX_RUNS)] | None = None
    found: dict[str, str] = {}
    commands: list[tuple[_Name, _Count, str | None]] = []
    more: bool = False


class Mirror:
    """The folder `root` with the mirrored runs of the source `label`. Not thread-safe."""

    def __init__(self, root: Path, label: str) -> None:
        """Lock the folder. Raises OSError, also if another process mirrors into it."""
        self.root, self._label = root, label
        self.live: dict[str, float] = {}
        """Monotonic time at which a run was last received as live."""
        self._listed: set[str] = set()
        self._logged: set[str] = set()
        root.mkdir(mode=0o700, parents=True, exist_ok=True)
        self._lock = open_for_append(root / LOCK)
        if try_lock(self._lock) is False:
            os.close(self._lock)
            raise OSError(f"Another Stepscope mirrors into {root}.")
        self._bytes = sum(size for _, size, _ in self._used())  # on disk, at most

    def close(self) -> None:
        os.close(self._lock)

    def start_of(self, run_id: str) -> dict[str, Any]:
        """Return what is here of a run: sizes of growing files, last row of each table."""
        files, stores = {}, {}
        with suppress(FileNotFoundError):
            for entry in os.scandir(self.root / run_id):
                if far_reader.GROWING.fullmatch(entry.name):
                    files[entry.name] = None, entry.stat(follow_symlinks=False).st_size
                elif far_reader.STORE.fullmatch(entry.name):
                    stores[entry.name] = self._last_rows(Path(entry.path))
        return {"files": files, "stores": stores}

    def apply(self, answer: Answer) -> None:
        """Write an answer, and delete the runs that are no longer listed.

        Omits what is invalid, and logs it once. Raises OSError (disk full).
        """
        if answer.runs is not None:
            self._listed = set(filter(is_run_id, answer.runs))
            for folder in self._folders():
                if folder.name not in self._listed:
                    shutil.rmtree(folder)
                    self.live.pop(folder.name, None)
        for run_id, text in answer.found.items():
            if run_id in self._listed:
                try:
                    self._write(run_id, msgspec.json.decode(text, type=FarRun))
                except (ValueError, RecursionError) as error:
                    self._omit(run_id, str(error))
        (self.root / CONTACT).touch(mode=0o600)

    def commands(self, followed: Iterable[str]) -> list[Command]:
        """Return the commands to deliver. Refuses those that are too old."""
        found: list[Command] = []
        for run_id in followed:
            path = self.root / run_id / STORE_NAME
            if run_id not in self.live or not path.exists():
                continue
            with self._opened(path) as store:
                rows = store.execute(
                    "SELECT id, name, args, asked_ts FROM commands WHERE state = 'asked' "
                    "ORDER BY id"
                ).fetchall()
            for number, name, args, asked_ts in rows:
                if time.time() - asked_ts < UNDELIVERED_S:
                    found.append((run_id, number, name, args))
                else:
                    self.end_command(run_id, number, "The remote host was not connected.")
        return found

    def end_command(self, run_id: str, number: int, refused: str | None) -> None:
        """Store that a command was delivered or `refused`: it is not sent again."""
        with self._opened(self.root / run_id / STORE_NAME) as store:
            store.execute(
                "UPDATE commands SET state = ? WHERE id = ?",
                ("taken" if refused is None else "refused", number),
            )

    def shrink(self, kept: Collection[str], max_bytes: int = MAX_BYTES) -> None:
        """Delete stores, logs and large files of the runs used least recently, except `kept`.

        Their metadata stay, so that they are listed and can be loaded again. Raises OSError if the
        runs that are kept are larger.
        """
        if self._bytes <= max_bytes:
            return
        used = sorted(self._used(), key=lambda entry: entry[0])
        self._bytes = sum(size for _, size, _ in used)
        for _, _, folder in used:
            for path in () if folder.name in kept else list(folder.iterdir()):
                if self._bytes > 0.8 * max_bytes and not far_reader.WHOLE.fullmatch(path.name):
                    self._bytes -= path.lstat().st_size
                    path.unlink()
        if self._bytes > max_bytes:
            raise OSError(f"The mirror has {self._bytes:,} bytes of runs that are live or open.")

    def _folders(self) -> list[Path]:
        return [path for path in self.root.iterdir() if path.is_dir()]

    def _used(self) -> list[tuple[float, int, Path]]:
        """Return the time of the last change, the size and the folder of each mirrored run."""
        found = []
        for folder in self._folders():
            files = [path.lstat() for path in folder.iterdir()]
            changed = max((status.st_mtime for status in files), default=0.0)
            found.append((changed, sum(status.st_size for status in files), folder))
        return found

    def _write(self, run_id: str, run: FarRun) -> None:
        """Write what is new in a run. Raises ValueError, OSError."""
        folder = self.root / run_id
        folder.mkdir(mode=0o700, exist_ok=True)
        if run.names is not None:
            for path in folder.iterdir():
                is_small = far_reader.WHOLE.fullmatch(path.name) and path.name != RUN_JSON
                if is_small and path.name not in run.names:
                    path.unlink()
        for file in run.files:
            self._write_file(folder, file)
        for name, rows in run.stores.items():
            self._write_store(folder / name, rows)
        if run.error is not None:
            self._omit(run_id, run.error)

    def _write_file(self, folder: Path, file: FarFile) -> None:
        is_whole = file.offset is None
        names = far_reader.WHOLE if is_whole else far_reader.GROWING
        if not names.fullmatch(file.name):
            raise ValueError(f"the file {file.name!r}")
        path, data = folder / file.name, file.data
        self._bytes += len(data)
        if not is_whole:
            with open(open_for_append(path, truncate=file.offset == 0), "ab") as out:
                if out.tell() == file.offset:
                    out.write(data)
            return
        if far_reader.METADATA.fullmatch(file.name):
            data = self._with_facts(data, file.facts)
        atomic_write(path, data, durable=False)
        if file.name == RUN_JSON and file.facts is not None and file.facts.live:
            self.live[folder.name] = time.monotonic()
        with suppress(FileNotFoundError):
            os.utime(folder / RUN_JSON)  # the status of a run follows from all its ranks

    def _with_facts(self, data: bytes, facts: FarFacts | None) -> bytes:
        """Return run.json with the key `mirror`, which `run.rank_info` reads."""
        content = json.loads(data)
        if not isinstance(content, dict) or facts is None:
            raise ValueError("metadata without facts")
        given = {"source": self._label, "received": time.time()}
        content["mirror"] = msgspec.to_builtins(facts) | given
        return json.dumps(content).encode()

    def _write_store(self, path: Path, rows: FarStore) -> None:
        """Add rows to a mirrored store in one transaction. Raises ValueError, OSError."""
        if not far_reader.STORE.fullmatch(path.name) or rows.version != schema.SCHEMA_VERSION:
            raise ValueError(f"the store {path.name!r} of version {rows.version}")
        if not path.exists():
            with closing(schema.create(path)) as store:
                # Quicker to open and close, and a power failure costs a transfer only.
                store.execute("PRAGMA journal_mode = DELETE")
        self._bytes -= path.stat().st_size
        with self._opened(path) as store:
            store.execute("BEGIN IMMEDIATE")
            for table, columns in far_reader.TABLES.items():
                places = ", ".join("?" * len(columns.split(",")))
                store.executemany(
                    f"INSERT OR REPLACE INTO {table} ({columns}) VALUES ({places})",
                    getattr(rows, table),
                )
            store.execute("COMMIT")
        self._bytes += path.stat().st_size

    def _opened(self, path: Path) -> closing[sqlite3.Connection]:
        connection = schema.open_writable(path)
        connection.set_progress_handler(None, 0)
        connection.execute("PRAGMA synchronous = OFF")
        return closing(connection)

    def _last_rows(self, path: Path) -> dict[str, int]:
        """Return the last row of each table; deletes a damaged store, which is loaded again."""
        found = {}
        try:
            with self._opened(path) as store:
                for table in far_reader.TABLES:
                    (last,) = store.execute(f"SELECT max(rowid) FROM {table}").fetchone()
                    found[table] = last or 0
        except (StoreError, sqlite3.Error) as error:
            log.warning("%s: the mirrored store is loaded again: %s", path, error)
            schema.delete(path)
            return {}
        return found

    def _omit(self, run_id: str, what: str) -> None:
        """Log once that something of the other host was not mirrored."""
        text = f"{run_id[:100]!r}: {printable(what[:300])}"
        if text not in self._logged and len(self._logged) < 1000:
            self._logged.add(text)
            log.warning("%s: not mirrored: %s", self._label, text)
