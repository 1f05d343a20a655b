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
from stepscope.remote.source import SshAddress, parse_address
from stepscope.run import RunStatus, is_own, read_run
from stepscope.run.rank_info import readable_ranks
from stepscope.store import STORE_NAME, SeriesBlock, StoreReader, StoreWriter
from stepscope.store.blocks import Event
from tests.support.recorded_runs import write_run

LIVE = {"status": "running"}
STEPS = [(1.0, 1, {"train/loss": 1.0})]


class Link:
    """A reader of the folder `far` and a mirror in `near`, without a connection between them."""

    def __init__(self, root: Path) -> None:
        self.far, self.near = root / "far", root / "near"
        self.far.mkdir()
        self.reader = far_reader.FarReader(str(self.far))
        self.mirror = Mirror(self.near, "far:/runs")

    def ask(self, *followed: str, commands: Any = (), large: bool = False) -> Answer:
        """Exchange until the far side has no more."""
        while True:
            request = {
                "known": self.mirror.known(),
                "live": list(self.mirror.live),
                "commands": commands,
                "follow": {run: self.mirror.cursor(run, large=large) for run in followed},
            }
            text = json.dumps(self.reader.answer(json.loads(json.dumps(request))), allow_nan=False)
            answer = msgspec.json.decode(text, type=Answer)
            assert answer.error is None
            self.mirror.apply(answer, followed)
            if not answer.more:
                return answer

    def reconnect(self) -> None:
        """Go on as another server with another connection."""
        self.mirror.close()
        self.reader = far_reader.FarReader(str(self.far))
        self.mirror = Mirror(self.near, "far:/runs")

    def list_anew(self) -> None:
        """Let the far side read ended runs and the list now."""
        self.reader.known = {run: (one[0], 0.0) for run, one in self.reader.known.items()}
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
    ("text", "address"),
    [
        ("ssh://h/a/b", SshAddress("h", "/a/b")),
        ("ssh://me@login-1.hpc:2222/~/runs", SshAddress("login-1.hpc", "~/runs", "me", 2222)),
        ("ssh://[::1]/a%20b", SshAddress("[::1]", "/a b")),
    ],
)
def test_addresses(text: str, address: SshAddress) -> None:
    assert parse_address(text) == address


@pytest.mark.parametrize(
    "text",
    ["ssh://h/", "http://h/a", "ssh://-oProxyCommand=x/a", "ssh://h:0/a", "ssh://h:x/a"]
    + ["ssh://u:secret@h/a", "ssh://-l@h/a", "ssh:///a"],
)
def test_a_wrong_address_is_refused_without_its_password(text: str) -> None:
    with pytest.raises(ValueError, match="source: ") as error:
        parse_address(text)
    assert "secret" not in str(error.value)


def test_the_far_program_is_python_3_6_and_needs_the_standard_library_only() -> None:
    source = Path(far_reader.__file__).read_text()
    tree = ast.parse(source, feature_version=(3, 6))
    for node in ast.walk(tree):
        if isinstance(node, ast.Import | ast.ImportFrom):
            name = node.module if isinstance(node, ast.ImportFrom) else node.names[0].name
            assert str(name).split(".")[0] in sys.stdlib_module_names


def test_a_growing_store_is_equal_after_each_exchange(link: Link) -> None:
    """The writer extends its newest frame, merges frames of 64 rows at 512, and adds levels."""
    folder = write_run(link.far / "r", LIVE)
    writer, step = StoreWriter(folder / STORE_NAME, reopen=True), 0
    for count in (1, 5, 63, 64, 200, 179, 1, 700, 3000, 1):
        with writer.transaction():
            new = [(float(step + n), step + n, {"train/loss": 1.0}) for n in range(count)]
            writer.append("steps", "", SeriesBlock.from_rows(new))
            writer.add_event(Event(1.0, step, 0, "mark", f"at {step}", {}))
        step += count
        link.ask("r")
        assert frames(link.near / "r") == frames(folder)
        assert rows(link.near / "r") == rows(folder)
    writer.close()
    link.ask("r")
    assert json.loads(bytes(link.ask("r").follow["r"])) == {"files": [], "gone": [], "stores": {}}


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
        events = ((1, "mark", b"x"), (9e999, "mark", "x"), (1, "k" * 200, "x"), (1, "mark", "good"))
        sql = "INSERT INTO events VALUES (NULL, ?, 1, 0, ?, ?, '{}')"
        store.executemany(sql, events)
        store.execute("INSERT INTO series VALUES (77, ?, 'x')", (b"blob",))
    link.ask("good", "odd", *bad)
    assert rows(link.near / "good") == rows(link.far / "good")
    assert [one for one in rows(link.near / "odd") if one[1:] == ("good",)]


def test_a_locked_store_is_read_later_and_never_without_its_lock(link: Link) -> None:
    folder = write_run(link.far / "r", LIVE, steps=STEPS)
    with closing(sqlite3.connect(folder / STORE_NAME, isolation_level=None)) as other:
        other.execute("BEGIN EXCLUSIVE")
        link.ask("r")
        assert not (link.near / "r" / STORE_NAME).exists()
    link.ask("r")
    assert rows(link.near / "r") == rows(folder)


def test_a_smaller_mirror_keeps_the_metadata_and_loads_the_rest_again(link: Link) -> None:
    for name in ("a", "b"):
        write_run(link.far / name, steps=STEPS)
    link.ask("a", "b")
    link.mirror.shrink(0, kept=["b"])
    assert {path.name for path in (link.near / "a").iterdir()} == {"run.json"}
    assert rows(link.near / "b") == rows(link.far / "b")
    shutil.rmtree(link.near / "a")  # a cleared cache
    (link.near / "a").mkdir()
    link.ask("a")
    assert rows(link.near / "a") == rows(link.far / "a")


def test_only_one_process_mirrors_into_a_folder(link: Link) -> None:
    with pytest.raises(OSError, match="another Stepscope"):
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
        link.reconnect()
    link.ask("r")
    left = {"run.json", "output.log", STORE_NAME}
    assert {path.name for path in (link.near / "r").iterdir()} == left


def test_a_host_deletes_small_files_of_its_runs_only(link: Link) -> None:
    write_run(link.far / "r", LIVE)
    link.ask("r")
    for path in (link.near / "out.json", link.near.parent / "out.json"):
        path.write_text("")
    names = ["../out.json", "../../out.json", str(link.near / "out.json"), "run.json", STORE_NAME]
    answer = Answer(follow={"r": msgspec.Raw(msgspec.json.encode({"gone": names}))})
    link.mirror.apply(answer, ["r"])
    assert {path.name for path in (link.near / "r").iterdir()} == {"run.json", STORE_NAME}
    assert (link.near / "out.json").exists()
    assert (link.near.parent / "out.json").exists()


def test_an_ended_run_is_followed_until_its_other_ranks_have_ended(link: Link) -> None:
    folder = write_run(link.far / "r", LIVE | {"world_size": 2})
    link.ask()
    assert "r" in link.mirror.live
    change(folder / "run.json", status="finished")
    link.ask()
    assert 0 < link.mirror.live["r"] - time.monotonic() <= 10
    before = (link.near / "r" / "run.json").stat().st_mtime_ns
    shutil.copy(folder / "run.json", folder / "rank1.json")
    link.ask("r")
    assert (link.near / "r" / "run.json").stat().st_mtime_ns > before  # lists read the run again
    shutil.rmtree(folder)
    link.list_anew()
    link.ask()
    assert link.mirror.live == {}


@pytest.mark.parametrize("is_new", [False, True])
def test_a_live_run_is_listed_beyond_the_newest(
    link: Link, monkeypatch: pytest.MonkeyPatch, is_new: bool
) -> None:
    monkeypatch.setattr(far_reader, "MAX_RUNS", 2)
    file = write_run(link.far / "a", LIVE) / "run.json"
    link.ask()
    for name in ("b", "c"):
        write_run(link.far / name)
    link.list_anew()
    link.ask()
    change(file, status="finished")
    if is_new:
        link.reconnect()
    link.ask()
    assert read_run(link.near / "a").status is RunStatus.FINISHED
    link.list_anew()
    link.mirror.live.clear()
    assert link.ask().runs == ["c", "b"]


def test_run_json_of_an_open_run_beyond_the_newest_is_followed(
    link: Link, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = write_run(link.far / "a", LIVE | {"pid": 2**22 + 1}) / "run.json"
    link.ask("a")
    monkeypatch.setattr(far_reader, "MAX_RUNS", 1)
    write_run(link.far / "b")
    link.list_anew()
    change(file, status="failed")
    assert link.ask("a").runs == ["b"]
    assert read_run(link.near / "a").status is RunStatus.FAILED


def test_a_live_run_that_is_deleted_there_is_live_no_more(link: Link) -> None:
    folder = write_run(link.far / "r", LIVE | {"world_size": 2})
    shutil.copy(folder / "run.json", folder / "rank1.json")
    link.ask("r")
    moved = folder.rename(link.far.parent / "r")
    link.list_anew()
    link.ask()
    run = read_run(link.near / "r")
    assert (run.status, link.mirror.live) == (RunStatus.CRASHED, {})
    assert [rank.status for rank in readable_ranks(run.folder)] == 2 * [RunStatus.CRASHED]
    assert "no longer" in str(read_only_reason(run))
    link.reconnect()
    assert link.mirror.live == {}
    os.utime(moved.rename(folder) / "run.json")  # its disk was not mounted
    link.ask()
    assert read_run(link.near / "r").status is RunStatus.RUNNING


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


def test_a_command_is_stored_once_and_not_after_its_deadline_or_the_end(link: Link) -> None:
    folder = write_run(link.far / "r", LIVE)
    write_run(link.far / "ended")
    link.ask()
    sent = (("r", 1, 9), ("r", 1, 9), ("r", 2, -1), ("ended", 3, 9), ("../r", 4, 9))
    now = time.monotonic()
    answer = link.ask(commands=[[run, id, "mark", "{}", now + left] for run, id, left in sent])
    assert [one[2] is None for one in answer.commands] == [True, True, False, False, False]
    with closing(sqlite3.connect(folder / STORE_NAME)) as store:
        assert store.execute("SELECT id, name FROM commands").fetchall() == [(1, "mark")]


def test_a_command_for_a_run_of_another_user_is_refused(
    link: Link, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_run(link.far / "r", LIVE)
    monkeypatch.setattr(far_reader.os, "geteuid", lambda: os.getuid() + 1)
    answer = link.ask(commands=[["r", 1, "mark", "{}", time.monotonic() + 9]])
    assert "another user" in str(answer.commands[0][2])


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
