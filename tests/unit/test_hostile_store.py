"""An untrusted store costs little, changes nothing, and its intact rows are readable."""

from __future__ import annotations

import json
import os
import shutil
import sqlite3
import struct
import tracemalloc
import zlib
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from stepscope.store import STORE_NAME, SeriesBlock, StoreError, StoreReader, StoreWriter, schema
from stepscope.store.blocks import Event, encode
from stepscope.store.reader import send_command
from stepscope.store.ring import SLOT, RingRows
from stepscope.store.writer import recover
from tests.support.run_folders import make_run

ROWS = 1536


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A run folder with three full frames of steps, three events, and no other file."""
    folder = tmp_path / "run"
    folder.mkdir()
    writer = StoreWriter(folder / STORE_NAME)
    steps = np.arange(ROWS, dtype=float)
    with writer.transaction():
        writer.append("steps", "", SeriesBlock.raw(("a",), 1000.0 + steps, steps, steps[None]))
        for number in range(3):
            writer.add_event(Event(float(number), number, 0, "mark", f"event {number}", {}))
    writer.close()
    return folder


def change(folder: Path, *statements: str) -> None:
    """Change a store without Stepscope."""
    with sqlite3.connect(folder / STORE_NAME, isolation_level=None) as connection:
        for statement in statements:
            connection.execute(statement)
    connection.close()


def half_written(folder: Path, vfs: str = "unix") -> sqlite3.Connection:
    """Begin a transaction on a network disk; half of its change is in the file already."""
    uri = f"{(folder / STORE_NAME).as_uri()}?vfs={vfs}"
    connection = sqlite3.connect(uri, isolation_level=None, uri=True)
    connection.execute("PRAGMA cache_size = 1")
    connection.execute("BEGIN")
    connection.execute("UPDATE frames SET data = zeroblob(5000)")
    return connection


def read(folder: Path) -> None:
    with StoreReader(folder) as reader:
        for info in reader.series():
            reader.keys(info.id)
            reader.read(info.id, 0, info.rows, 1)
        reader.events()


def add(folder: Path) -> None:
    """Add a row and an event, as the recovery of a killed run does."""
    rows = SeriesBlock.raw(("a",), np.array([9e3]), np.array([9e3]), np.array([[1.0]]))
    with closing(StoreWriter(folder / STORE_NAME, reopen=True)) as writer, writer.transaction():
        writer.append("steps", "", rows)
        writer.add_event(Event(9e3, 9, 0, "mark", "added", {}))
        writer.append_slots(RingRows(np.empty(0, SLOT), writer.stored_slots() + 1, []))


OPENERS: dict[str, Callable[[Path], object]] = {
    "read": read,
    "send": lambda folder: send_command(folder, "stop", {}),
    "add": add,
}


def is_refused(folder: Path, *openers: str) -> None:
    """Check that each function that opens a store refuses this store and changes no file."""
    path = folder / STORE_NAME
    before = path.read_bytes() if path.is_file() else None
    for opener in openers or OPENERS:
        with pytest.raises((StoreError, sqlite3.DatabaseError)):
            OPENERS[opener](folder)
    assert (path.read_bytes() if path.is_file() else None) == before


def test_a_link_to_a_store_is_read_and_not_written(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "linked").mkdir()
    (tmp_path / "linked" / STORE_NAME).symlink_to(folder / STORE_NAME)
    read(tmp_path / "linked")
    is_refused(tmp_path / "linked", "send", "add")


ENDLESS = "WITH RECURSIVE n(i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM n) SELECT i FROM n"


EVENTS = "id, ts, step, epoch, kind, data"


@pytest.mark.parametrize(
    ("statements", "openers"),
    [
        (("ALTER TABLE frames RENAME TO kept", f"CREATE VIEW frames AS {ENDLESS}"), "read add"),
        (("DROP TABLE events", "CREATE VIRTUAL TABLE events USING fts5(text)"), "read add"),
        (
            (
                "DROP TABLE events",
                f"CREATE TABLE events ({EVENTS}, text AS (zeroblob(70000000)))",
                f"INSERT INTO events ({EVENTS}) VALUES (1, 1.0, 1, 1, 'mark', '{{}}')",
            ),
            "read add",
        ),
        (("DROP TABLE ring",), "add"),
        (("CREATE TRIGGER t AFTER INSERT ON commands BEGIN DELETE FROM frames; END",), "send"),
        (("CREATE TRIGGER t AFTER INSERT ON events BEGIN DELETE FROM series; END",), "add"),
    ],
)
def test_another_schema_is_refused_where_it_is_used(
    folder: Path, statements: tuple[str, ...], openers: str
) -> None:
    change(folder, *statements)
    is_refused(folder, *openers.split())


@pytest.mark.parametrize(
    "statement",
    [
        "SELECT * FROM sqlite_master",
        "ATTACH 'other.sqlite' AS other",
        "DELETE FROM other",
    ],
)
def test_a_store_opens_for_its_own_tables_only(folder: Path, statement: str) -> None:
    change(folder, "CREATE TABLE other (x)")
    connection = schema.open_writable(folder / STORE_NAME)
    with closing(connection), pytest.raises(sqlite3.DatabaseError, match="authorized|prohibited"):
        connection.execute(statement)


def test_a_journal_cannot_have_a_file_deleted(folder: Path, tmp_path: Path) -> None:
    """SQLite deletes the file that a journal names as that of a transaction of several stores."""
    canary = tmp_path / "canary"
    canary.write_text("precious")
    pages = (folder / STORE_NAME).stat().st_size // 4096
    magic = bytes.fromhex("d9d505f920a163d7")
    header = magic + struct.pack(">IIIII", 0, 1234, pages, 512, 4096)
    name = os.fsencode(canary)
    record = struct.pack(">I", (1 << 30) // 4096 + 1) + name
    record += struct.pack(">II", len(name), sum(name)) + magic
    (folder / f"{STORE_NAME}-journal").write_bytes(header.ljust(512, b"\0") + record)
    is_refused(folder, "send", "add")
    assert canary.read_text() == "precious"
    read(folder)


def test_recovery_rolls_a_transaction_back(folder: Path, tmp_path: Path) -> None:
    """On a network disk there is no log, but a journal; readers may not write and leave it."""
    copy = make_run(tmp_path / "copy", pid=2**22 + 1)
    connection = half_written(folder)
    shutil.copytree(folder, copy, dirs_exist_ok=True)
    connection.close()
    assert (copy / f"{STORE_NAME}-journal").stat().st_size > 0
    recover(copy)
    assert not (copy / f"{STORE_NAME}-journal").exists()
    (copy / f"{STORE_NAME}-journal").write_bytes(bytes(512))  # killed before it had an effect
    recover(copy)
    assert not (copy / f"{STORE_NAME}-journal").exists()
    with StoreReader(copy) as reader:
        assert reader.read(1, 0, ROWS, 1).mean[0].tolist() == list(range(ROWS))


@pytest.mark.parametrize("host", [{}, {"status": "finished"}, {"host": "x", "old": True}], ids=str)
def test_a_live_transaction_is_kept(folder: Path, tmp_path: Path, host: dict[str, Any]) -> None:
    """Rank 0 has ended, this one has not; many network disks have no locks between hosts."""
    run = make_run(tmp_path / "live", **host)
    shutil.copytree(folder, run, dirs_exist_ok=True)
    connection = half_written(run, vfs="unix-none")
    recover(run)
    connection.execute("COMMIT")
    assert connection.execute("SELECT DISTINCT length(data) FROM frames").fetchall() == [(5000,)]
    connection.close()


LATE = np.full(256, 1e300)
"""Times that no library formats."""


@pytest.mark.parametrize(
    "damage",
    [
        "data = x'00ff00'",
        f"data = x'{encode(SeriesBlock.raw(('a',), LATE, LATE, LATE[None]), 0).hex()}'",
        "layout = 2",
        "layout = 3",
        "layout = 4",
    ],
)
def test_a_damaged_frame_costs_its_rows_alone(
    folder: Path, caplog: pytest.LogCaptureFixture, damage: str
) -> None:
    bomb = zlib.compress(bytes(100_000_000), 1)
    deep = "[" * 100_000
    many = json.dumps([f"key {number}" for number in range(60_000)])
    change(
        folder,
        f"INSERT INTO layouts VALUES (2, '{deep}'), (3, '{many}'), (4, '[1, null]')",
        f"UPDATE frames SET data = x'{bomb.hex()}' WHERE level = 1",
        f"UPDATE frames SET {damage} WHERE level = 0 AND first = 512",
    )
    tracemalloc.start()
    for _ in range(2):
        with StoreReader(folder) as reader:
            (info,) = reader.series()
            rows, buckets = reader.read(1, 0, info.rows, 1), reader.read(1, 0, info.rows, 16)
            assert reader.keys(1) == ("a",)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 50e6
    assert rows.step.tolist() == [*range(512), *range(768, ROWS)]
    assert rows.mean[0].tolist() == rows.step.tolist()
    assert buckets.count.sum() == ROWS - 256
    assert caplog.text.count("omitted") == 1


@pytest.mark.parametrize(
    ("column", "value"),
    [
        ("text", "CAST(zeroblob(2000000) AS TEXT)"),
        ("text", "x'ff'"),
        ("ts", "1e300"),
        ("step", "1.5"),
        ("data", "'[]'"),
        ("data", f"'{'[' * 100_000}'"),
        ("data", f"""'{{"a": {"[" * 100}{"]" * 100}}}'"""),
    ],
)
def test_a_damaged_event_costs_itself(
    folder: Path, caplog: pytest.LogCaptureFixture, column: str, value: str
) -> None:
    change(folder, f"UPDATE events SET {column} = {value} WHERE id = 2")
    for _ in range(2):
        with StoreReader(folder) as reader:
            assert [event.id for event in reader.events()] == [1, 3]
            assert [event.id for event in reader.events(limit=2)] == [3]
            assert [event.id for event in reader.events(limit=-1)] == [1, 3]
    assert caplog.text.count("omitted") == 1


def test_a_damaged_text_of_an_event(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    change(folder, "UPDATE events SET text = CAST(x'41ff42' AS TEXT) WHERE id = 2")
    with StoreReader(folder) as reader:
        assert [event.text for event in reader.events()] == ["event 0", "A\ufffdB", "event 2"]
    monkeypatch.setattr("stepscope.store.reader.MAX_EVENTS_LENGTH", 20)
    with StoreReader(folder) as reader:
        assert [event.id for event in reader.events()] == [2, 3]
    change(folder, "UPDATE events SET text = CAST(zeroblob(70000000) AS TEXT) WHERE id = 2")
    with StoreReader(folder) as reader, pytest.raises(StoreError, match="too big"):
        reader.events()


@pytest.mark.parametrize(
    "statements",
    [
        ("UPDATE frames SET first = 'x' WHERE first = 512",),
        ("UPDATE frames SET first = 1 << 60 WHERE first = 1024",),
        ("UPDATE frames SET rows = -5 WHERE first = 512",),
        ("UPDATE frames SET rows = 1 << 40",),
        ("UPDATE frames SET ts_end = 'x', data = ''",),
        ("UPDATE series SET source = x'00'",),
        ("DELETE FROM layouts",),
        ("DELETE FROM ring",),
        ("UPDATE ring SET stored = 'x'",),
    ],
)
def test_any_value_raises_only_store_errors(folder: Path, statements: tuple[str, ...]) -> None:
    change(folder, *statements)
    calls: list[Callable[[StoreReader], object]] = [
        lambda reader: reader.series(),
        lambda reader: reader.keys(1),
        lambda reader: reader.read(1, 0, ROWS, 1),
        lambda reader: reader.read(1, 0, ROWS, 64),
        lambda reader: reader.rows_between(1, "step", 600, 700),
        lambda reader: reader.rows_between(1, "time", 1600, 1700),
        lambda reader: reader.stored_slots(),
        lambda reader: StoreWriter(folder / STORE_NAME, reopen=True).close(),
    ]
    failed = []
    for call in calls:
        with StoreReader(folder) as reader:
            try:
                call(reader)
            except StoreError as error:
                failed.append(error)
    assert len(failed) < len(calls)


def test_a_query_is_interrupted_in_time(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(schema, "MAX_QUERY_S", 0.05)
    with StoreReader(folder) as reader, pytest.raises(StoreError), reader._reading():
        reader._connection.execute(f"SELECT count(*) FROM ({ENDLESS})").fetchall()
