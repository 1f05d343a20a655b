"""The list of runs is current, and an update reads only what may have changed."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from dashboard import run_index
from dashboard.api.page_token import page_token
from dashboard.controls.run_picker import newest_live
from dashboard.run_index import RunIndex
from stepscope.run import RunStatus, process_identity, read_run
from stepscope.run.metadata import edit_notes

LONG_AGO = 1_000.0
MIRROR = {"source": "h:/r", "age_s": 1.0, "alive": None, "received": 1.0, "reason": None}


def write(root: Path, name: str, status: str = "running", **run_info: Any) -> Path:
    folder = root / name
    folder.mkdir(parents=True, exist_ok=True)
    now = time.time()
    known = {"name": name, "status": status, "created": now, "heartbeat": now}
    (folder / "run.json").write_text(json.dumps(known | process_identity() | run_info))
    return folder


def age(*paths: Path) -> None:
    """Make files and folders old: recent modification times are not trusted."""
    for path in paths:
        os.utime(path, (LONG_AGO, LONG_AGO))


@pytest.fixture
def reads(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The names of the runs that are read; reading "worse" fails."""
    seen: list[str] = []

    def counted(folder: Path) -> Any:
        seen.append(folder.name)
        if folder.name == "worse":
            raise ZeroDivisionError("an unexpected error")
        return read_run(folder)

    monkeypatch.setattr(run_index, "read_run", counted)
    return seen


def ids(index: RunIndex) -> list[str]:
    return [run.id for run in index.fresh().runs]


def test_live_runs_come_first_then_the_newest(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, status in (("b", "finished"), ("2", "running"), ("1", "paused"), ("a", "failed")):
        write(tmp_path, name, status, created={"1": 1.0, "2": 2.0, "b": 3.0, "a": 4.0}[name])
    assert ids(RunIndex(tmp_path)) == ["2", "1", "a", "b"]
    monkeypatch.setattr(run_index, "MAX_LISTED", 2)
    age(tmp_path / "2" / "run.json")
    assert ids(RunIndex(tmp_path)) == ["1", "a", "b"], "the newest by name, and those that write"


def test_an_update_reads_a_few_of_many_live_runs_and_all_in_turn(
    tmp_path: Path, reads: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(run_index, "MAX_LISTED", 20)
    monkeypatch.setattr(run_index, "MAX_READ", 4)
    monkeypatch.setattr(run_index, "MAX_CHECKED", 3)
    live = [f"live{number:02}" for number in range(10)]
    for name in (*live, *(f"ran{number:03}" for number in range(100))):
        path = write(tmp_path, name, "running" if name in live else "finished") / "run.json"
        if name not in live:
            age(path)
    age(tmp_path)
    index = RunIndex(tmp_path)
    assert [name for name in ids(index) if name in live] == live[::-1], "older than 100 others"
    write(tmp_path, live[3], "finished")
    stats: list[str] = []
    stat = os.stat

    def counted(path: Any, **options: Any) -> os.stat_result:
        stats.append(str(path))
        return stat(path, **options)

    monkeypatch.setattr(run_index.os, "stat", counted)
    for update in range(3):
        reads.clear()
        stats.clear()
        ids(index)
        assert len(reads) == 4
        # Of the folder, of each run.json and notes.json for their times, and in reading a run.
        # Three ended runs are only checked.
        assert len(stats) == 1 + 3 * 4 + 2 * 3, update
    assert len(index.fresh().runs) == 29, "the ended one is no longer among the newest"
    reads.clear()
    for _ in range(9):
        ids(index)
    assert {reads.count(name) for name in live if name != live[3]} == {4}


def test_an_ended_run_is_read_once_and_a_live_one_at_each_update(
    tmp_path: Path, reads: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    age(write(tmp_path, "ended", "finished") / "run.json", tmp_path)
    index = RunIndex(tmp_path)
    index.fresh()
    write(tmp_path, "live")
    age(tmp_path)
    listed: list[Path] = []
    listdir: Callable[[Path], list[str]] = os.listdir
    monkeypatch.setattr(run_index.os, "listdir", lambda path: listed.append(path) or listdir(path))
    os.utime(tmp_path, (LONG_AGO + 9, LONG_AGO + 9))
    for _ in range(3):
        assert ids(index) == ["live", "ended"]
    assert len(listed) == 1, "the folder is listed after a change only"
    for _ in range(100):  # polls of many tabs
        index.recent(max_age_s=3600)
    index.recent(max_age_s=0)
    assert (reads.count("ended"), reads.count("live")) == (1, 4)


def test_another_server_renames_an_ended_run(
    tmp_path: Path, reads: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(run_index, "MAX_CHECKED", 2)
    for name in "abcd":
        age(write(tmp_path, name, "finished") / "run.json")
    age(tmp_path)
    index = RunIndex(tmp_path)
    first = index.fresh()
    edit_notes(tmp_path / "a", name="renamed")
    index.fresh()
    names = {run.id: run.run_json["name"] for run in index.fresh().runs}
    assert names == {"a": "renamed", "b": "b", "c": "c", "d": "d"}
    assert index.fresh().version != first.version
    age(tmp_path / "a" / "notes.json")
    for _ in range(4):
        index.fresh()
    reads.clear()
    for _ in range(4):
        index.fresh()
    assert reads == []


def test_the_version_changes_with_the_status_of_a_run(tmp_path: Path) -> None:
    index = RunIndex(tmp_path / "runs")
    versions = [index.fresh().version]  # no such folder yet
    (tmp_path / "runs" / "a").mkdir(parents=True)  # nor a run.json
    assert index.fresh().version == versions[0]
    for status in (RunStatus.PENDING, RunStatus.RUNNING, RunStatus.FINISHED):
        write(tmp_path / "runs", "a", status)
        versions.append(index.fresh().version)
        assert index.fresh().version == versions[-1]
    (tmp_path / "runs" / "a" / "run.json").unlink()
    (tmp_path / "runs" / "a").rmdir()
    assert len(set(versions)) == 4
    assert index.fresh().version == versions[0]


def test_another_run_of_an_old_name_and_a_run_of_another_host_are_read_again(
    tmp_path: Path,
) -> None:
    folder = write(tmp_path, "a", "finished")
    far = write(tmp_path, "far", host="elsewhere", heartbeat=LONG_AGO)
    age(folder / "run.json", far / "run.json", tmp_path)
    index = RunIndex(tmp_path)
    assert {run.status for run in index.fresh().runs} == {RunStatus.FINISHED, RunStatus.CRASHED}
    (folder / "run.json").unlink()
    write(tmp_path, "a", "stopped")
    write(tmp_path, "b", "finished")
    write(tmp_path, "far", host="elsewhere")
    found = {run.id: run.status for run in index.fresh().runs}
    assert (found["a"], found["far"]) == (RunStatus.STOPPED, RunStatus.RUNNING)


def test_a_crashed_run_of_a_mirror_is_read_again_after_a_change_only(
    tmp_path: Path, reads: list[str]
) -> None:
    write(tmp_path, "far", host="elsewhere", heartbeat=LONG_AGO, mirror=MIRROR | {"alive": False})
    age(tmp_path / "far" / "run.json", tmp_path)
    index = RunIndex(tmp_path)
    for _ in range(3):
        assert index.fresh().runs[0].status is RunStatus.CRASHED
    assert reads == ["far"]
    write(tmp_path, "far", "finished", host="elsewhere", mirror=MIRROR)
    assert index.fresh().runs[0].status is RunStatus.FINISHED
    assert reads == ["far", "far"]


def test_unreadable_runs_are_not_listed_and_logged_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, reads: list[str]
) -> None:
    write(tmp_path, "odd", world_size=2, local_rank=0, local_world_size=10**30, folder_of="host")
    for name, content in (("broken", "{"), ("nested", "[" * 100_000)):
        (write(tmp_path, name) / "run.json").write_text(content)
    (tmp_path / "file").write_text("x")
    (tmp_path / "folder").mkdir()
    (tmp_path / ".hidden").mkdir()
    write(tmp_path, "worse")
    write(tmp_path, "good")
    index = RunIndex(tmp_path)
    for _ in range(3):
        assert ids(index) == ["good", "odd"]
    assert len(caplog.records) == 3
    assert "worse" in reads


def test_a_page_takes_the_newest_live_run_of_this_machine_ours_first(tmp_path: Path) -> None:
    index = RunIndex(tmp_path)
    now = time.time()
    for name, run_info, newest in (
        ("ended", {"status": "finished"}, None),
        ("far", {"host": "elsewhere", "created": now + 9}, None),
        ("mirrored", {"mirror": MIRROR, "created": now + 9}, None),
        ("eve", {"user": "eve", "created": now + 5}, "eve"),
        ("old", {"created": 5.0}, "old"),
        ("new", {"created": 6.0}, "new"),
    ):
        write(tmp_path, name, **run_info)  # type: ignore[arg-type]
        assert newest_live(index.fresh().runs) == newest


def test_the_token_of_a_page_changes_with_what_the_page_is_built_from(tmp_path: Path) -> None:
    folder = write(tmp_path, "a", step=1, heartbeat=time.time())
    index = RunIndex(tmp_path)

    def token() -> str:
        return page_token(index.fresh(), read_run(folder))

    seen = [token()]
    write(tmp_path, "a", step=2)
    assert token() == seen[0]  # a step and a heartbeat change no page
    changes: dict[str, Any] = {"kind": "script", "device": "GPU-1", "devices": [{"id": "GPU-1"}]}
    changes |= {"optimizers": ["Adam"], "custom": ["train/x"], "commands": ["stop"]}
    changes |= {"capabilities": {"energy": "not supported"}, "total_steps": 50}
    changes |= {"world_size": 2, "status": "paused"}
    for name, value in changes.items():
        write(tmp_path, "a", **{name: value})
        seen.append(token())
    for name in ("snapshot-step-3.pickle", "profile-step-3-4.summary.json"):
        (folder / name).write_bytes(b"{}")
        seen.append(token())
    write(tmp_path, "b")
    seen.append(token())
    assert len(set(seen)) == len(seen)
    assert page_token(index.fresh(), None) == index.fresh().version
