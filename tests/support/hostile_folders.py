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


REPLACING = ("fifo", "link")
"""Kinds that take the place of whatever is there."""
FILES_OF = {"value": "*.json", "schema": "*.sqlite", "frame_bomb": "*.sqlite"}
KINDS = (
    *(*REPLACING, *FILES_OF, "bytes", "sparse", "bomb", "deep", "large"),
    *("mode", "owner", "temporary_links"),
)


@dataclasses.dataclass(frozen=True)
class Change:
    """One mutation, printable by Hypothesis: what is done to a path, by default a random one."""

    kind: str
    number: int = 0
    name: str = ""

    def apply(self, root: Path, canary: Path) -> None:
        """Change the folder; a change that does not fit the folder does nothing."""
        found = sorted(root.rglob(FILES_OF.get(self.kind, "*")))
        paths = [path for path in found if not path.is_relative_to(root / OTHER)]
        if not (self.name or paths):
            return
        path = root / self.name if self.name else paths[self.number % len(paths)]
        # An earlier change may have put a link there: its target is the machine's.
        if _is_inside(path.parent if self.kind in REPLACING else path, root):
            with contextlib.suppress(OSError, sqlite3.Error, ValueError):
                self._change(path, canary)

    def _change(self, path: Path, canary: Path) -> None:
        match self.kind:
            case "fifo":
                _remove(path)
                os.mkfifo(path)
            case "link":
                _remove(path)
                targets = [str(canary), "/dev/zero", "/dev/stdin", str(path), "/"]
                path.symlink_to(targets[self.number % len(targets)])
            case "value":
                path.write_text(json.dumps(_with_odd_value(json.loads(path.read_text()), self)))
            case "schema":
                _execute(path, SCHEMAS[self.number % len(SCHEMAS)])
            case "frame_bomb":
                _execute(path, f"UPDATE frames SET data = x'{_packed(15, bytes(1), 500).hex()}'")
            case "bytes":
                data = bytearray(path.read_bytes())
                some = random.Random(self.number)
                for _ in range(1 + self.number % 20):
                    data[some.randrange(len(data))] = some.randrange(256)
                path.write_bytes(data)
            case "sparse":
                os.truncate(path, SPARSE_BYTES)
            case "bomb":
                path.write_bytes(_packed(31, b"[", 300))
            case "deep":
                path.write_text('{"a":' * (50_000 + self.number % 3))
            case "large":
                path.write_text("[" + "0," * (JSON_BYTES // 2) + "0]")
            case "mode":
                path.chmod(0)
            case "owner":  # only root can
                os.chown(path, 12345, 12345)
            case "temporary_links":
                for name in ("run.json", "rank1.json", "sweep.json", "fit.json"):
                    (path / f".{name}.part").symlink_to(canary)


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


@functools.cache
def _packed(format_bits: int, byte: bytes, mebibytes: int) -> bytes:
    packer = zlib.compressobj(1, zlib.DEFLATED, format_bits)
    return b"".join(packer.compress(byte * 2**20) for _ in range(mebibytes)) + packer.flush()


def _with_odd_value(content: Any, change: Change) -> Any:
    """Replace a value at a random depth."""
    some = random.Random(change.number)
    place = content
    while isinstance(place, dict | list) and place:
        key = some.choice(list(place) if isinstance(place, dict) else range(len(place)))
        if not isinstance(place[key], dict | list) or some.random() < 0.3:
            place[key] = some.choice(VALUES)
            break
        place = place[key]
    return content


def _execute(path: Path, statements: str) -> None:
    with contextlib.closing(sqlite3.connect(path)) as connection:
        connection.execute("PRAGMA journal_mode = DELETE")
        connection.executescript(statements)
        connection.commit()
