"""A folder of runs with one of each file, and the mutations that an attacker could make of it."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import gzip
import json
import os
import random
import shutil
import sqlite3
import time
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

from stepscope.run import RunStatus, process_identity
from stepscope.store.recorder import Recorder
from tests.support.child_process import ROOT
from tests.support.fake_sweep import sweep as made_sweep

STORE = "rank0.sqlite"
RUN, OTHER = "20261122-061500-victim-ab12", "20261122-061400-bystander-cd34"
SWEEP = "20261122-061500-digits-mlp-ab12"
SPARSE_BYTES = 30 * 2**30
JSON_BYTES = 20 * 2**20


def make_runs(root: Path) -> None:
    """Write a run of two ranks that was killed, an intact run, and a sweep."""
    killed, lab = root / RUN, root / "lab" / SWEEP
    record(killed)
    record(root / OTHER)
    shutil.copy(killed / STORE, killed / "rank1.sqlite")
    shutil.copytree(ROOT / "tests/data/hangs/sleep-gloo", killed, dirs_exist_ok=True)
    (killed / "agreement/answers").mkdir(parents=True)
    lab.mkdir(parents=True)
    for name, content in FILES.items():
        (killed / name).write_bytes(content)
    begun = json.loads((killed / "run.json").read_text()) | process_identity()
    begun |= {"status": "running", "world_size": 2, "pid": 2**22 - 7, "heartbeat": time.time() - 60}
    for rank, name in enumerate(("run.json", "rank1.json")):
        (killed / name).write_text(json.dumps(begun | {"rank": rank}))
    os.utime(killed / "run.json", (time.time() - 60, time.time() - 60))
    sweep = made_sweep("stopped", id=SWEEP, **process_identity())
    (lab / "sweep.json").write_text(json.dumps(sweep))
    (lab / "plan.json").write_text(json.dumps({"schema": 1, **sweep["plan"]}))
    (lab / "trials.jsonl").write_text('{"round": 0}\n')


def record(folder: Path) -> None:
    """Record 20 steps and an event into a new run folder."""
    folder.mkdir(parents=True)
    recorder = Recorder(folder, name="test")
    recorder.set_status(RunStatus.RUNNING)
    for step in range(1, 21):
        recorder.log(step, {"train/loss": 1 / step})
    recorder.event("mark", "hello")
    recorder.close(RunStatus.FINISHED)


FILES = {
    "output.log": b"line\n" * 50,
    "traceback.txt": b"line\n" * 50,
    "oom.json": b"{}",
    "fit.json": b"{}",
    "profile-step-5-6.summary.json": b"{}",
    "profile-step-5-6.json.gz": gzip.compress(b"{}"),
    "snapshot-step-5.pickle": b"\x80\x04}.",
    "last.pt": b"PK",
    "agreement/proposals.json": b"{}",
    "agreement/answers/rank0.json": b"{}",
    "rank0.ring": b"stepscope ring 3\n",
}
"""What a run may have, besides its store."""
VALUES: tuple[Any, ...] = (
    *(None, True, -1, 0, 1e308, -1e308, float("nan"), float("inf"), 10**400, 2**63),
    *("", "x" * 100_000, "\x1b[31m\n\x00\ud800", "../../canary"),
    *([], {}, [[]] * 10_000, {"a": {"b": []}}),
)
SCHEMAS = (
    "DROP TABLE frames; CREATE VIEW frames AS WITH RECURSIVE n(x) AS "
    "(SELECT 1 UNION ALL SELECT x + 1 FROM n) SELECT x AS series, 0 AS level, x AS first, "
    "1 AS rows, 1 AS layout, 0 AS ts_end, 0 AS step_end, x'00' AS data FROM n",
    "DROP TABLE events; CREATE VIEW events AS WITH RECURSIVE n(x) AS "
    "(SELECT 1 UNION ALL SELECT x + 1 FROM n) SELECT x AS id, 0.0 AS ts, 0 AS step, 0 AS epoch, "
    "'mark' AS kind, 'x' AS text, '{}' AS data FROM n",
    "CREATE TRIGGER evil AFTER INSERT ON commands BEGIN DELETE FROM frames; "
    "UPDATE commands SET name = 'stop'; END",
    "DROP TABLE commands; CREATE VIEW commands AS SELECT 1 AS id",
    "UPDATE events SET text = zeroblob(200000000)",
    "UPDATE events SET data = replace(hex(zeroblob(50000)), '00', '[')",
    "UPDATE events SET ts = 'soon', step = x'00', kind = 7",
    "UPDATE events SET ts = 1e308, step = 9223372036854775807",
    "UPDATE frames SET rows = 9223372036854775807",
    "UPDATE frames SET rows = -1, first = 'x'",
    "UPDATE frames SET level = 60, data = x'00'",
    "UPDATE frames SET ts_end = 'x'",
    "UPDATE layouts SET keys = '[[[[1]]]]'",
    "UPDATE layouts SET keys = replace(hex(zeroblob(50000)), '00', '[')",
    "UPDATE series SET stream = 7, source = x'00'",
    "PRAGMA user_version = 999",
    "PRAGMA user_version = -1",
    "DELETE FROM ring",
    "UPDATE ring SET stored = 1e300",
    "DROP TABLE ring; CREATE VIRTUAL TABLE ring USING fts5(stored)",
    "CREATE TABLE more (x); INSERT INTO more VALUES (zeroblob(1000000))",
)


@dataclasses.dataclass(frozen=True)
class Change:
    """One mutation, printable by Hypothesis: what is done to a path, by default a random one."""

    kind: str
    number: int = 0
    name: str = ""

    def apply(self, root: Path, canary: Path) -> None:
        """Change the folder; a change that does not fit the folder does nothing."""
        found = sorted(root.rglob(SUITABLE.get(self.kind, "*")))
        paths = [path for path in found if not path.is_relative_to(root / OTHER)]
        if not (self.name or paths):
            return
        path = root / self.name if self.name else paths[self.number % len(paths)]
        if not _is_inside(path.parent, root):
            return  # an earlier change has put a link there: its target is the machine's
        if self.kind not in REPLACING and not _is_inside(path, root):
            return
        with contextlib.suppress(OSError, sqlite3.Error, ValueError):
            KINDS[self.kind](path, canary, self.number)


def _is_inside(path: Path, root: Path) -> bool:
    """Return True if no link and no special file lies between the folder of runs and the path."""
    places = [path, *path.parents]
    below = places[: places.index(root)]
    return all(not one.is_symlink() and (one.is_file() or one.is_dir()) for one in below)


def _remove(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def _fifo(path: Path, _canary: Path, _number: int) -> None:
    _remove(path)
    os.mkfifo(path)


def _link(path: Path, canary: Path, number: int) -> None:
    _remove(path)
    path.symlink_to([str(canary), "/dev/zero", "/dev/stdin", str(path), "/"][number % 5])


def _bytes(path: Path, _canary: Path, number: int) -> None:
    data = bytearray(path.read_bytes())
    some = random.Random(number)
    for _ in range(1 + number % 20):
        if data:
            data[some.randrange(len(data))] = some.randrange(256)
    path.write_bytes(data)


def _sparse(path: Path, _canary: Path, _number: int) -> None:
    with path.open("ab") as file:
        file.truncate(SPARSE_BYTES)


def _bomb(path: Path, _canary: Path, _number: int) -> None:
    path.write_bytes(_packed(31, b"[", 300))


@functools.cache
def _packed(format_bits: int, byte: bytes, mebibytes: int) -> bytes:
    packer = zlib.compressobj(1, zlib.DEFLATED, format_bits)
    return b"".join(packer.compress(byte * 2**20) for _ in range(mebibytes)) + packer.flush()


def _deep(path: Path, _canary: Path, number: int) -> None:
    path.write_text('{"a":' * (50_000 + number % 3))


def _large(path: Path, _canary: Path, _number: int) -> None:
    path.write_text("[" + "0," * (JSON_BYTES // 2) + "0]")


def _value(path: Path, _canary: Path, number: int) -> None:
    content = json.loads(path.read_text())
    some = random.Random(number)
    for _ in range(1 + number % 4):
        place: Any = content
        while isinstance(place, dict | list) and place:
            keys = list(place) if isinstance(place, dict) else list(range(len(place)))
            key = some.choice(keys)
            if not isinstance(place[key], dict | list) or some.random() < 0.3:
                place[key] = some.choice(VALUES)
                break
            place = place[key]
    path.write_text(json.dumps(content))


def _mode(path: Path, _canary: Path, _number: int) -> None:
    path.chmod(0)


def _owner(path: Path, _canary: Path, _number: int) -> None:
    """Give the file to another user: only root can."""
    os.chown(path, 12345, 12345)


def _temporary_links(path: Path, canary: Path, _number: int) -> None:
    for name in ("run.json", "rank1.json", "sweep.json", "fit.json"):
        (path / f".{name}.part").symlink_to(canary)
        (path / name).with_suffix(".part").symlink_to(canary)
        for pid in {os.getpid(), os.getppid(), *range(max(1, os.getpid()), os.getpid() + 50)}:
            (path / f".{name}.{pid}.part").symlink_to(canary)


def _schema(path: Path, _canary: Path, number: int) -> None:
    connection = sqlite3.connect(path)
    try:
        connection.execute("PRAGMA journal_mode = DELETE")
        connection.executescript(SCHEMAS[number % len(SCHEMAS)])
        connection.commit()
    finally:
        connection.close()


def _frame_bomb(path: Path, _canary: Path, _number: int) -> None:
    connection = sqlite3.connect(path)
    try:
        connection.execute("UPDATE frames SET data = ?", (_packed(15, b"\0", 500),))
        connection.commit()
    finally:
        connection.close()


KINDS: dict[str, Callable[[Path, Path, int], None]] = {
    change.__name__.removeprefix("_"): change
    for change in (
        *(_fifo, _link, _bytes, _sparse, _bomb, _deep, _large, _value, _mode),
        *(_owner, _temporary_links, _schema, _frame_bomb),
    )
}
REPLACING = ("fifo", "link")
"""Kinds that take the place of whatever is there."""
SUITABLE = {"value": "*.json", "schema": "*.sqlite", "frame_bomb": "*.sqlite"}
