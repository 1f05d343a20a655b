"""The local copy of the runs of another host. Nothing that it sends is written outside of it."""

from __future__ import annotations

import json
import logging
import os
import sqlite3
import time
from collections.abc import Collection, Iterator, Mapping
from contextlib import closing, suppress
from pathlib import Path
from typing import Annotated, Any, TypeVar

import msgspec

from stepscope.common.files import atomic_write, open_for_append, try_lock
from stepscope.common.formatting import printable
from stepscope.remote import far_reader
from stepscope.remote.access import CONTACT
from stepscope.run import RUN_JSON, is_run_id
from stepscope.run.rank_info import find_rank
from stepscope.store import StoreError, schema, store_name

log = logging.getLogger(__name__)

UNDELIVERED_S = 30.0  # age from which a command is no longer sent
ENDED_S = 10.0  # an ended run is updated for this long: its other ranks end later
MAX_RUN_BYTES = 2 * 2**30
LOCK = ".lock"

_T = TypeVar("_T")
_Count = Annotated[int, msgspec.Meta(ge=0, le=2**53)]
_Level = Annotated[int, msgspec.Meta(ge=0, le=far_reader.LEVELS)]
_Rows = Annotated[int, msgspec.Meta(ge=1, le=far_reader.FRAME_ROWS)]
_Text = Annotated[str, msgspec.Meta(max_length=far_reader.MAX_TEXT)]
_Name = Annotated[str, msgspec.Meta(max_length=120)]
_Data = Annotated[bytes, msgspec.Meta(max_length=2 * far_reader.MAX_BLOB_BYTES)]


class FarFacts(msgspec.Struct):
    """What only the other host knows of a run: its heartbeat's age, its process, its rights."""

    live: bool
    age_s: Annotated[float, msgspec.Meta(ge=0, le=1e9)]
    alive: bool | None
    reason: Annotated[str, msgspec.Meta(max_length=300)] | None


class FarFile(msgspec.Struct):
    """A whole file, or with `offset` the next bytes of a file that grows."""

    name: _Name
    offset: _Count | None
    data: _Data
    signature: Annotated[list[Any], msgspec.Meta(max_length=3)] | None = None
    facts: FarFacts | None = None


class FarStore(msgspec.Struct):
    """New rows of a store, in the order of the columns of its tables."""

    version: int
    series: list[tuple[_Count, _Text, _Text]] = []
    layouts: list[tuple[_Count, _Text]] = []
    events: list[tuple[_Count, float, int, int, _Text, _Text, _Text]] = []
    frames: list[tuple[_Count, _Level, _Count, _Rows, _Count, float, float, _Data]] = []
    signature: Annotated[list[Any], msgspec.Meta(max_length=2)] | None = None


class FarRun(msgspec.Struct):
    """What is new in the folder of a run, and the small files that are gone."""

    files: list[FarFile] = []
    gone: list[_Name] = []
    stores: dict[str, FarStore] = {}
    error: str | None = None


class Answer(msgspec.Struct):
    """An answer of `far_reader`; runs are decoded one by one, so that one may be invalid."""

    error: str | None = None
    now: float = 0.0
    runs: Annotated[list[_Name], msgspec.Meta(max_length=far_reader.MAX_RUNS)] = []
    gone: list[_Name] = []
    listed: dict[str, msgspec.Raw] = {}
    follow: dict[str, msgspec.Raw] = {}
    commands: list[tuple[_Name, _Count, str | None]] = []
    more: bool = False


class Mirror:
    """The folder `root` with the mirrored runs of the source `label`. Not thread-safe."""

    def __init__(self, root: Path, label: str) -> None:
        """Lock the folder. Raises OSError, also if another process mirrors into it."""
        self.root, self._label = root, label
        self.seen: dict[str, dict[str, list[Any]]] = {}
        """Signatures of the files by run, as the other host has given them."""
        self._stores: dict[Path, dict[str, Any]] = {}
        self._logged: set[str] = set()
        root.mkdir(mode=0o700, parents=True, exist_ok=True)
        self._lock = open_for_append(root / LOCK)
        if try_lock(self._lock) is False:
            os.close(self._lock)
            raise OSError("another Stepscope uses it")
        self.bytes = sum(size for _, size, _ in self._used())  # Size on disk, at most.
        ranks = ((name, find_rank(root / name, 0)) for name in filter(is_run_id, os.listdir(root)))
        self.live = {name: float("inf") for name, rank in ranks if rank and rank.status.live}
        """Live runs, and ended ones until this monotonic time."""

    def close(self) -> None:
        os.close(self._lock)

    def known(self) -> dict[str, list[Any]]:
        """Return the signatures of the run.json files that are here."""
        return {run: seen[RUN_JSON] for run, seen in self.seen.items() if RUN_JSON in seen}

    def cursor(self, run_id: str, *, large: bool) -> dict[str, Any]:
        """Return what is here of a run; `large` asks for snapshots and traces, too."""
        folder, stores = self.root / run_id, {}
        seen: dict[str, Any] = dict(self.seen.get(run_id, {}))
        sizes: dict[str, tuple[int, Any]] = {}
        with suppress(OSError):
            for entry in os.scandir(folder):
                if far_reader.APPENDED.fullmatch(entry.name) or is_large(entry.name):
                    size = entry.stat(follow_symlinks=False).st_size
                    sizes[entry.name] = size, seen.get(entry.name, [None])[0]
                elif (number := far_reader.STORE.fullmatch(entry.name)) is not None:
                    stores[number[1]] = self._store_cursor(folder / entry.name)
                elif far_reader.WHOLE.fullmatch(entry.name):
                    seen.setdefault(entry.name, None)  # of an earlier server
        large &= sum(size for size, _ in sizes.values()) < MAX_RUN_BYTES
        return {"seen": seen, "sizes": sizes, "stores": stores, "large": large}

    def apply(self, answer: Answer, followed: Collection[str]) -> None:
        """Write an answer about the `followed` runs into the mirror.

        Omits what is invalid or was not requested, and logs it once. Raises OSError (disk full).
        """
        names = set(answer.runs)
        for run_id, raw in answer.listed.items():
            if run_id in names and (file := self._decoded(run_id, raw, FarFile)) is not None:
                self._write_file(run_id, file)
        for run_id, raw in answer.follow.items():
            if run_id not in followed or (run := self._decoded(run_id, raw, FarRun)) is None:
                continue
            for name in run.gone:
                if far_reader.WHOLE.fullmatch(name) and name != RUN_JSON:
                    (self.root / run_id / name).unlink(missing_ok=True)
                    self.seen.get(run_id, {}).pop(name, None)
            for file in run.files:
                self._write_file(run_id, file)
            for number, rows in run.stores.items():
                self._write_store(run_id, number, rows)
            if run.error is not None:
                self._omit(run_id, run.error)
        for run_id in answer.gone:
            if self.live.pop(run_id, None) == float("inf"):
                self._end_deleted(run_id)
        now = time.monotonic()
        self.live = {run_id: until for run_id, until in self.live.items() if until >= now}
        (self.root / CONTACT).touch(mode=0o600)

    def _decoded(self, run_id: str, raw: msgspec.Raw, kind: type[_T]) -> _T | None:
        try:
            return msgspec.json.decode(raw, type=kind)
        except (ValueError, RecursionError) as error:
            self._omit(run_id, str(error))
            return None

    def commands(self, run_id: str) -> list[tuple[int, str, str, float]]:
        """Return the commands to deliver as (id, name, args JSON, seconds left for it).

        Commands that are too old are refused.
        """
        path = self.root / run_id / store_name(0)
        with self._opened(path) as store:
            rows = store.execute(
                "SELECT id, name, args, asked_ts FROM commands WHERE state = 'asked' ORDER BY id"
            ).fetchall()
        left = [(*row[:3], UNDELIVERED_S - (time.time() - row[3])) for row in rows]
        for number, _, _, seconds in left:
            if seconds <= 0:
                self.end_command(run_id, number, "The remote host was not connected.")
        return [row for row in left if row[3] > 0]

    def end_command(self, run_id: str, number: int, refused: str | None) -> None:
        """Store that a command was delivered or `refused`: it is not sent again."""
        state = ("taken", None) if refused is None else ("refused", refused)
        with self._opened(self.root / run_id / store_name(0)) as store:
            store.execute(
                "UPDATE commands SET state = ?, result = ? WHERE id = ?", (*state, number)
            )

    def shrink(self, max_bytes: int, kept: Collection[str]) -> None:
        """Delete stores, logs and large files of the runs used least recently, except `kept`.

        Their metadata stay, so that they are listed and can be loaded again.
        """
        used = sorted(self._used(), key=lambda entry: entry[0])
        self.bytes = sum(size for _, size, _ in used)
        for _, _, folder in used:
            if self.bytes <= max_bytes:
                break
            if folder.name in kept:
                continue
            for path in list(folder.iterdir()):
                if far_reader.WHOLE.fullmatch(path.name) is None:
                    self.bytes -= path.lstat().st_size
                    path.unlink()
                    self._stores.pop(path, None)

    def _used(self) -> Iterator[tuple[float, int, Path]]:
        """Yield the time of the last change, the size and the folder of each mirrored run."""
        for name in filter(is_run_id, os.listdir(self.root)):
            files = [entry.stat(follow_symlinks=False) for entry in os.scandir(self.root / name)]
            changed = max((status.st_mtime for status in files), default=0.0)
            yield changed, sum(status.st_size for status in files), self.root / name

    def _write_file(self, run_id: str, file: FarFile) -> None:
        name, data, folder = file.name, file.data, self.root / run_id
        whole = far_reader.WHOLE.fullmatch(name) is not None
        grows = far_reader.APPENDED.fullmatch(name) is not None or is_large(name)
        if not is_run_id(run_id) or not (whole if file.offset is None else grows):
            self._omit(run_id, f"the file {name!r}")
            return
        folder.mkdir(mode=0o700, exist_ok=True)
        path = folder / name
        self.bytes += len(data)
        if file.offset is not None:
            with open(open_for_append(path, truncate=file.offset == 0), "ab") as out:
                if out.tell() == file.offset:
                    out.write(data)
        else:
            metadata = far_reader.METADATA.fullmatch(name) is not None
            try:
                data = self._with_source(data, file.facts) if metadata else data
            except (ValueError, RecursionError) as error:
                self._omit(run_id, f"{name} ({error})")
                return
            atomic_write(path, data, durable=False)
            if name == RUN_JSON and file.facts is not None:
                self._set_live(run_id, live=file.facts.live)
            elif metadata:
                with suppress(FileNotFoundError):
                    os.utime(folder / RUN_JSON)  # the status of a run follows from all its ranks
        if file.signature is not None:
            self.seen.setdefault(run_id, {})[name] = file.signature

    def _set_live(self, run_id: str, *, live: bool) -> None:
        if live:
            self.live[run_id] = float("inf")
        elif self.live.get(run_id) == float("inf"):
            self.live[run_id] = time.monotonic() + ENDED_S

    def _end_deleted(self, run_id: str) -> None:
        """Let a live run that was deleted on the other host count as crashed; its data stay."""
        gone = {"alive": False, "reason": "It is no longer on the remote host."}
        for path in sorted((self.root / run_id).glob("*.json")):  # run.json last: lists read it
            if far_reader.METADATA.fullmatch(path.name):
                content = json.loads(path.read_bytes())
                content["mirror"] |= gone
                atomic_write(path, json.dumps(content), durable=False)
        self.seen.pop(run_id, None)

    def _with_source(self, data: bytes, facts: FarFacts | None) -> bytes:
        """Return run.json with the key `mirror`, which `run.rank_info` reads."""
        content = json.loads(data)
        if not isinstance(content, dict) or facts is None:
            raise ValueError("no object with facts")
        given = {"source": self._label, "received": time.time()}
        content["mirror"] = msgspec.to_builtins(facts) | given
        return json.dumps(content).encode()

    def _write_store(self, run_id: str, number: str, rows: FarStore) -> None:
        """Add rows to a mirrored store in one transaction."""
        name = f"rank{number}.sqlite"
        if not far_reader.STORE.fullmatch(name):
            self._omit(run_id, f"the store {name!r}")
            return
        if rows.version != schema.SCHEMA_VERSION:
            self._omit(
                run_id, f"{name}: its version is {rows.version}, not {schema.SCHEMA_VERSION}"
            )
            return
        path = self.root / run_id / name
        path.parent.mkdir(mode=0o700, exist_ok=True)
        try:
            if not path.exists():
                self._stores.pop(path, None)
                with closing(schema.create(path)) as store:
                    # Quicker to open and close, and a power failure costs a transfer only.
                    store.execute("PRAGMA journal_mode = DELETE")
            with self._opened(path) as store:
                store.execute("BEGIN IMMEDIATE")
                _insert(store, rows)
                store.execute("COMMIT")
        except (StoreError, sqlite3.Error, OverflowError) as error:
            self._omit(run_id, f"{name} ({error})")
            self._stores.pop(path, None)
            return
        self.bytes += sum(len(row[-1]) for row in rows.frames)
        cursor = self._store_cursor(path)
        for table in ("series", "layouts", "events"):
            cursor[table] = max(cursor[table], *(row[0] for row in getattr(rows, table)), 0)
        for series, level, first, count, *_ in rows.frames:
            _set_end(cursor, series, level, first + count)
        cursor["signature"] = rows.signature

    def _opened(self, path: Path) -> closing[sqlite3.Connection]:
        connection = schema.open_writable(path)
        connection.set_progress_handler(None, 0)
        connection.execute("PRAGMA synchronous = OFF")
        return closing(connection)

    def _store_cursor(self, path: Path) -> dict[str, Any]:
        """Return the last ids of a mirrored store, and the number of rows of each level."""
        if path not in self._stores:
            cursor: dict[str, Any] = {"frames": {}}
            try:
                with self._opened(path) as store:
                    for table in ("series", "layouts", "events"):
                        query = f"SELECT coalesce(max(id), 0) FROM {table}"
                        cursor[table] = store.execute(query).fetchone()[0]
                    for series, level, end in store.execute(
                        "SELECT series, level, max(first + rows) FROM frames GROUP BY 1, 2"
                    ):
                        _set_end(cursor, series, level, end)
            except (StoreError, sqlite3.Error) as error:
                log.warning("%s: the mirrored store is loaded again: %s", path, error)
                for suffix in schema.MAX_BYTES:
                    Path(f"{path}{suffix}").unlink(missing_ok=True)
                return {"series": 0, "layouts": 0, "events": 0, "frames": {}}
            self._stores[path] = cursor
        return self._stores[path]

    def _omit(self, run_id: str, what: str) -> None:
        """Log once that something of the other host was not mirrored."""
        text = f"{run_id[:100]!r}: {printable(what[:300])}"
        if text not in self._logged and len(self._logged) < 1000:
            self._logged.add(text)
            log.warning("%s: not mirrored: %s", self._label, text)


def is_large(name: str) -> bool:
    """Return True for the name of a memory snapshot or of a profiler's trace."""
    return far_reader.LARGE.fullmatch(name) is not None


def _set_end(cursor: Mapping[str, Any], series: int, level: int, end: int) -> None:
    ends = cursor["frames"].setdefault(str(series), [])
    ends.extend([0] * (level + 1 - len(ends)))
    ends[level] = max(ends[level], end)


def _insert(store: sqlite3.Connection, rows: FarStore) -> None:
    store.executemany("INSERT OR REPLACE INTO series VALUES (?, ?, ?)", rows.series)
    store.executemany("INSERT OR REPLACE INTO layouts VALUES (?, ?)", rows.layouts)
    store.executemany("INSERT OR REPLACE INTO events VALUES (?, ?, ?, ?, ?, ?, ?)", rows.events)
    for series, level, first, count, *_ in rows.frames:
        # The writer extends its newest frame, and merges small frames into one.
        store.execute(
            "DELETE FROM frames WHERE series = ? AND level = ? AND first >= ? AND first < ?",
            (series, level, first, first + count),
        )
    store.executemany("INSERT OR REPLACE INTO frames VALUES (?, ?, ?, ?, ?, ?, ?, ?)", rows.frames)
