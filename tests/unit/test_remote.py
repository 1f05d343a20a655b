"""Addresses; what the far reader sends of changing folders, and what the mirror makes of it."""

from __future__ import annotations

import ast
import json
import os
import shutil
import sqlite3
import sys
import time
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import msgspec
import pytest

from stepscope.remote import far_reader
from stepscope.remote.access import read_only_reason
from stepscope.remote.mirror import Answer, Mirror
from stepscope.remote.source import parse_source
from stepscope.run import RunStatus, is_own, read_run
from stepscope.store import STORE_NAME, StoreReader, StoreWriter
from stepscope.store.blocks import Event
from stepscope.store.reader import send_command
from tests.support.recorded_runs import write_run
from tests.support.run_folders import block_of_rows

LIVE = {"status": "running"}
STEPS = [(1.0, 1, {"train/loss": 1.0})]


class Link:
    """A reader of the folder `far` and a mirror in `near`, without a connection between them."""

    def __init__(self, root: Path) -> None:
        self.far, self.near = root / "far", root / "near"
        self.far.mkdir()
        self.connect()

    def connect(self) -> None:
        """Begin as another server with another connection."""
        self.reader = far_reader.FarReader(str(self.far))
        self.mirror = Mirror(self.near, "far/runs")
        self.started: set[str] = set()

    def ask(self, *followed: str, commands: Any = (), age_s: float = 0, large: bool = False) -> Any:
        """Exchange until the far side has no more; return the results of the commands."""
        results: list[Any] = []
        while True:
            request = {
                "now": time.monotonic() - age_s,
                "follow": dict.fromkeys(followed, large),
                "start": {run: self.mirror.start_of(run) for run in {*followed} - self.started},
                "commands": commands,
            }
            text = json.dumps(self.reader.answer(json.loads(json.dumps(request))), allow_nan=False)
            answer = msgspec.json.decode(text, type=Answer)
            self.mirror.apply(answer)
            self.started = set(followed)
            results += answer.commands
            if not answer.more:
                return results

    def list_anew(self) -> None:
        """Let the far side read the list now."""
        self.reader.listed_at = -1e9


def change(file: Path, **run_json: Any) -> None:
    file.write_text(json.dumps(json.loads(file.read_text()) | run_json))


@pytest.fixture
def link(tmp_path: Path) -> Iterator[Link]:
    made = Link(tmp_path)
    yield made
    made.mirror.close()


def rows(folder: Path) -> list[tuple[Any, ...]]:
    with StoreReader(folder) as reader:
        found = [(one, reader.read(one.id, 0, one.rows, 1)) for one in reader.series()]
        events = [(event.id, event.text) for event in reader.events()]
    return [(one.stream, block.keys, block.step.tolist()) for one, block in found] + [*events]


def frames(folder: Path) -> set[tuple[Any, ...]]:
    with closing(sqlite3.connect(folder / STORE_NAME)) as store:
        found = store.execute("SELECT series, level, first, rows, data FROM frames").fetchall()
    return set(found)


@pytest.mark.parametrize(
    "text", ["ssh://h/a/b", "ssh://me@login-1.hpc:2222/~/runs", "ssh://[::1]/a%20b"]
)
def test_addresses(text: str) -> None:
    assert parse_source(text) == text


@pytest.mark.parametrize(
    "text",
    ["ssh://h/", "http://h/a", "ssh://-oProxyCommand=x/a", "ssh://h:x/a", "ssh://h/a\nb"]
    + ["ssh://u:secret@h/a", "ssh://-l@h/a", "ssh:///a"],
)
def test_a_wrong_address_is_refused_without_its_password(text: str) -> None:
    with pytest.raises(ValueError, match="source: ") as error:
        parse_source(text)
    assert "secret" not in str(error.value)


def test_the_far_program_is_python_3_6_and_needs_the_standard_library_only() -> None:
    source = Path(far_reader.__file__).read_text()
    tree = ast.parse(source, feature_version=(3, 6))
    for node in ast.walk(tree):
        if isinstance(node, ast.Import | ast.ImportFrom):
            name = node.module if isinstance(node, ast.ImportFrom) else node.names[0].name
            assert str(name).split(".")[0] in sys.stdlib_module_names


def test_a_growing_store_is_equal_after_each_exchange(link: Link) -> None:
    """The writer extends its newest frame and adds levels."""
    folder = write_run(link.far / "r", LIVE)
    writer, step = StoreWriter(folder / STORE_NAME, reopen=True), 0
    for count in (1, 5, 63, 64, 200, 179, 1, 700, 3000, 1):
        with writer.transaction():
            new = [(float(step + n), step + n, {"train/loss": 1.0}) for n in range(count)]
            writer.append("steps", "", block_of_rows(new))
            writer.add_event(Event(1.0, step, 0, "mark", f"at {step}", {}))
        step += count
        link.ask("r")
        assert frames(link.near / "r") == frames(folder)
        assert rows(link.near / "r") == rows(folder)
    writer.close()
    link.mirror.close()
    link.connect()
    link.ask("r")
    assert rows(link.near / "r") == rows(folder)
    assert link.reader.left > far_reader.ANSWER_BYTES - 1000, "only run.json is sent again"


def test_one_damaged_or_foreign_folder_hides_no_other(link: Link) -> None:
    write_run(link.far / "good", LIVE, steps=STEPS)
    bad = {
        "b": "[]",
        "c": "[" * 100_000,
        "d": '{"heartbeat": 1' + "0" * 400 + ', "status": "running"}',
        "e": '{"heartbeat": NaN, "status": "running"}',
    }
    for name, text in bad.items():
        (link.far / name).mkdir()
        (link.far / name / "run.json").write_text(text)
    odd = write_run(link.far / "odd", LIVE, steps=STEPS)
    with closing(sqlite3.connect(odd / STORE_NAME)) as store, store:
        events = ((1, b"x"), (9e999, "x"), (1, "good"))
        store.executemany("INSERT INTO events VALUES (NULL, ?, 1, 0, 'mark', ?, '{}')", events)
    link.ask("odd", "good", *bad)
    assert rows(link.near / "good") == rows(link.far / "good")


def test_a_smaller_mirror_keeps_the_metadata_and_loads_the_rest_again(link: Link) -> None:
    for name in ("a", "b"):
        write_run(link.far / name, steps=STEPS)
    link.ask("a", "b")
    link.mirror.shrink(["b"], 10**6)
    assert (link.near / "a" / STORE_NAME).exists()
    with pytest.raises(OSError, match="live or open"):
        link.mirror.shrink(["b"], 1)
    assert {path.name for path in (link.near / "a").iterdir()} == {"run.json"}
    assert rows(link.near / "b") == rows(link.far / "b")
    link.ask("b")
    link.ask("a")
    assert rows(link.near / "a") == rows(link.far / "a")
    (link.near / "a" / STORE_NAME).write_bytes(b"damaged" * 999)
    link.ask()
    link.ask("a")
    assert rows(link.near / "a") == rows(link.far / "a")


def test_only_one_process_mirrors_into_a_folder(link: Link) -> None:
    with pytest.raises(OSError, match="Another Stepscope"):
        Mirror(link.near, "far")


def test_a_rotated_log_replaces_the_old_one(link: Link) -> None:
    log = write_run(link.far / "r") / "output.log"
    log.write_text("old\n" * 25)
    link.ask("r")
    log.rename(log.with_name("output.1.log"))
    log.write_text("new\n" * 50)
    link.ask("r")
    assert (link.near / "r" / "output.log").read_text() == "new\n" * 50
    assert (link.near / "r" / "output.1.log").read_text() == "old\n" * 25


@pytest.mark.parametrize("is_new", [False, True])
def test_a_small_file_that_is_deleted_there_is_deleted_here(link: Link, is_new: bool) -> None:
    """The file of a rank that hangs is deleted when its steps go on."""
    folder = write_run(link.far / "r", LIVE)
    (folder / "hang-rank0.json").write_text("{}")
    (folder / "output.log").write_text("text")
    link.ask("r")
    assert (link.near / "r" / "hang-rank0.json").exists()
    (folder / "hang-rank0.json").unlink()
    if is_new:
        link.mirror.close()
        link.connect()
    link.ask("r")
    left = {"run.json", "output.log", STORE_NAME}
    assert {path.name for path in (link.near / "r").iterdir()} == left


def test_a_host_deletes_small_files_of_its_runs_only(link: Link) -> None:
    write_run(link.far / "r", LIVE)
    link.ask("r")
    (link.near / "out.json").write_text("")
    found = {"r": json.dumps({"names": ["../out.json"]})}
    link.mirror.apply(Answer(runs=["r", "..", "."], found=found))
    assert {path.name for path in (link.near / "r").iterdir()} == {"run.json", STORE_NAME}
    assert (link.near / "out.json").exists()


def test_live_and_open_runs_stay_among_the_newest(
    link: Link, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(far_reader, "MAX_RUNS", 3)
    file = write_run(link.far / "a", LIVE) / "run.json"
    for name in ("open", "old"):
        write_run(link.far / name)
    link.ask("open")
    assert link.mirror.live.keys() == {"a"}
    for name in ("x", "y"):
        write_run(link.far / name)
    link.list_anew()
    link.ask("open")
    assert {path.name for path in link.near.iterdir() if path.is_dir()} == {"a", "open", "y"}
    change(file, status="finished")
    link.list_anew()
    link.ask("open")
    assert read_run(link.near / "a").status is RunStatus.FINISHED


def test_a_run_that_is_deleted_there_is_deleted_here_and_may_return(link: Link) -> None:
    folder = write_run(link.far / "r", LIVE, steps=STEPS)
    link.ask("r")
    moved = folder.rename(link.far.parent / "r")
    link.list_anew()
    link.ask()
    assert not (link.near / "r").exists()
    assert link.mirror.live == {}
    moved.rename(folder)  # its disk was not mounted
    link.list_anew()
    link.ask("r")
    assert rows(link.near / "r") == rows(folder)


def test_a_run_without_heartbeat_or_process_is_not_live(link: Link) -> None:
    write_run(link.far / "here", LIVE | {"pid": 2**22 + 1})
    past = time.time() - 60
    there = write_run(link.far / "there", LIVE | {"host": "elsewhere", "heartbeat": past})
    os.utime(there / "run.json", (past, past))
    link.ask()
    assert link.mirror.live == {}
    for name in ("here", "there"):
        assert read_run(link.near / name).status is RunStatus.CRASHED


def test_a_store_in_wal_mode_of_another_host_is_neither_opened_nor_written(link: Link) -> None:
    folder = write_run(link.far / "r", LIVE | {"host": "elsewhere"})
    with closing(sqlite3.connect(folder / STORE_NAME)) as store:
        store.execute("PRAGMA journal_mode = WAL")
        store.execute("UPDATE ring SET stored = 1")
        store.commit()
        before = sorted(os.listdir(folder))
        link.ask("r")
        assert sorted(os.listdir(folder)) == before
        assert not (link.near / "r" / STORE_NAME).exists()
        assert "local disk" in str(read_only_reason(read_run(link.near / "r")))


def test_a_command_is_stored_once_and_not_late_or_after_the_end(link: Link) -> None:
    folder = write_run(link.far / "r", LIVE)
    write_run(link.far / "ended")
    link.ask()
    commands = [["r", 1, "mark", "{}"], ["r", 1, "mark", "{}"], ["ended", 3, "mark", "{}"]]
    assert [one[2] is None for one in link.ask(commands=commands)] == [True, True, False]
    late = link.ask(commands=[["r", 2, "mark", "{}"]], age_s=far_reader.LATE_S + 1)
    assert "late" in late[0][2]
    with closing(sqlite3.connect(folder / STORE_NAME)) as store:
        assert store.execute("SELECT id, name FROM commands").fetchall() == [(1, "mark")]


def test_a_command_for_a_run_of_another_user_is_refused(
    link: Link, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_run(link.far / "r", LIVE)
    monkeypatch.setattr(far_reader.os, "geteuid", lambda: os.getuid() + 1)
    assert "another user" in link.ask(commands=[["r", 1, "mark", "{}"]])[0][2]


def test_a_host_cannot_make_its_run_a_local_one(link: Link) -> None:
    """Local runs are recovered, signaled and alerted about."""
    folder = write_run(link.far / "r", LIVE | {"world_size": 3})
    content = (folder / "run.json").read_text()
    for name in ("rank1.json", "rank123456.json"):
        (folder / name).write_text(content)
    link.ask("r")
    near = link.near / "r"
    for name in ("run.json", "rank1.json", "rank123456.json"):
        assert "mirror" in json.loads((near / name).read_text())
    assert not is_own(read_run(near))
    change(near / "run.json", mirror={"age_s": 1e10})
    with pytest.raises(Exception, match="mirror"):
        read_run(near)


def test_the_end_of_a_rank_makes_lists_read_the_run_again(link: Link) -> None:
    folder = write_run(link.far / "r", LIVE | {"world_size": 2})
    link.ask("r")
    before = (link.near / "r" / "run.json").stat().st_mtime_ns
    shutil.copy(folder / "run.json", folder / "rank1.json")
    link.ask("r")
    assert (link.near / "r" / "run.json").stat().st_mtime_ns > before


@pytest.mark.parametrize("refused", [None, "The run has ended."])
def test_an_ended_command_is_not_delivered_again(link: Link, refused: str | None) -> None:
    write_run(link.far / "r", LIVE)
    link.ask("r")
    number = send_command(link.near / "r", "mark", {})
    assert [command[:3] for command in link.mirror.commands(["r"])] == [("r", number, "mark")]
    link.mirror.end_command("r", number, refused)
    assert link.mirror.commands(["r"]) == []


def test_a_locked_store_is_read_later_and_never_without_its_lock(link: Link) -> None:
    folder = write_run(link.far / "r", LIVE, steps=STEPS)
    with closing(sqlite3.connect(folder / STORE_NAME, isolation_level=None)) as other:
        other.execute("BEGIN EXCLUSIVE")
        link.ask("r")
        assert not (link.near / "r" / STORE_NAME).exists()
    link.ask("r")
    assert rows(link.near / "r") == rows(folder)
