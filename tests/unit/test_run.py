"""A run's status is judged from its folder, and names from outside cannot leave the root."""

from __future__ import annotations

import json
import os
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from stepscope.recorder.recovery import note_end
from stepscope.run import (
    RunError,
    RunStatus,
    new_run_folder,
    read_run,
    run_folder,
    run_folders,
    runs_root,
    write_run_json,
)
from tests.support.run_folders import make_run


def test_many_runs_of_one_name_and_second_get_folders_of_their_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(time, "strftime", lambda *_: "20260101-000000")
    with ThreadPoolExecutor(8) as pool:
        folders = list(pool.map(lambda _: new_run_folder(tmp_path / "runs", "sweep"), range(200)))
    assert len(set(folders)) == 200
    assert all(folder.is_dir() for folder in folders)


def test_a_live_process_is_running_however_old_its_heartbeat(tmp_path: Path) -> None:
    assert read_run(make_run(tmp_path, old=True)).status is RunStatus.RUNNING


@pytest.mark.parametrize(
    "gone", [{"pid": 2**22 + 1}, {"pid_started": 5.0, "pid_ticks": 5}, {"pid": "x"}]
)
def test_a_gone_process_reads_as_crashed(tmp_path: Path, gone: dict[str, Any]) -> None:
    run = read_run(make_run(tmp_path, **gone))
    assert run.status is RunStatus.CRASHED
    assert "resume" in str(run.reason)


def test_a_run_of_another_host_is_judged_by_its_heartbeat(tmp_path: Path) -> None:
    assert read_run(make_run(tmp_path, host="elsewhere")).status is RunStatus.RUNNING
    old = make_run(tmp_path, host="elsewhere", old=True)
    assert read_run(old).status is RunStatus.CRASHED


def test_a_run_of_another_container_is_judged_by_its_heartbeat(tmp_path: Path) -> None:
    """Two containers with one host name and one folder of runs number their processes alike."""
    other = {"pid_namespace": "another boot/4026531836", "pid": 2**22 + 1}
    assert read_run(make_run(tmp_path, **other)).status is RunStatus.RUNNING
    assert read_run(make_run(tmp_path, old=True, **other)).status is RunStatus.CRASHED
    twin = {"pid_namespace": "another boot/4026531836"}  # our number and start time, by chance
    assert read_run(make_run(tmp_path, old=True, **twin)).status is RunStatus.CRASHED


def test_a_run_that_names_no_namespace_lives_by_a_fresh_heartbeat_or_its_process(
    tmp_path: Path,
) -> None:
    unknown = {"pid_namespace": None}
    assert read_run(make_run(tmp_path, pid=2**22 + 1, **unknown)).status is RunStatus.RUNNING
    gone = make_run(tmp_path, old=True, pid=2**22 + 1, **unknown)
    assert read_run(gone).status is RunStatus.CRASHED
    assert read_run(make_run(tmp_path, old=True, **unknown)).status is RunStatus.RUNNING


def test_a_full_disk_keeps_alive_by_touching_the_file(tmp_path: Path) -> None:
    folder = make_run(tmp_path, host="elsewhere", old=True)
    os.utime(folder / "run.json")
    assert read_run(folder).status is RunStatus.RUNNING


def test_an_ended_run_keeps_its_status(tmp_path: Path) -> None:
    run = read_run(make_run(tmp_path, status="failed", reason="why", pid=2**22 + 1))
    assert (run.status, run.reason) == (RunStatus.FAILED, "why")


@pytest.mark.parametrize(
    "text", ["", "{", "[]", "{}", '{"status": "odd", "heartbeat": 1, "created": 1}']
)
def test_a_corrupt_run_json_is_refused_in_a_sentence(tmp_path: Path, text: str) -> None:
    folder = make_run(tmp_path)
    (folder / "run.json").write_text(text)
    with pytest.raises(RunError, match="not a Stepscope run"):
        read_run(folder)


@pytest.mark.parametrize(
    "name", ["", ".", "..", "../x", "a/b", "/etc", "-x", "a\0b", "x" * 200, "nothing-there"]
)
def test_a_hostile_run_name_is_refused(tmp_path: Path, name: str) -> None:
    (tmp_path.parent / "x").mkdir(exist_ok=True)
    with pytest.raises(RunError):
        run_folder(tmp_path, name)


def test_a_link_out_of_the_root_is_refused(tmp_path: Path) -> None:
    outside = make_run(tmp_path / "outside")
    (tmp_path / "root").mkdir()
    (tmp_path / "root" / "link").symlink_to(outside)
    with pytest.raises(RunError, match="name of a run folder"):
        run_folder(tmp_path / "root", "link")


def test_folders_are_listed_newest_first_and_strangers_left_out(tmp_path: Path) -> None:
    (tmp_path / "notes").mkdir()
    for name in ("20260101-a", "20260102-b"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "run.json").write_text(json.dumps({}))
    assert [f.name for f in run_folders(tmp_path)] == ["20260102-b", "20260101-a"]
    assert list(run_folders(tmp_path / "absent")) == []


@pytest.mark.parametrize("durable", [True, False])
def test_a_durable_file_is_on_the_disk_before_it_takes_the_place(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, durable: bool
) -> None:
    synced: list[bool] = []
    monkeypatch.setattr(os, "fsync", lambda _: synced.append((tmp_path / "run.json").exists()))
    write_run_json(tmp_path, {"a": 1}, durable=durable)
    assert synced == ([False] if durable else [])
    assert json.loads((tmp_path / "run.json").read_text()) == {"a": 1}


@pytest.mark.parametrize("value", [None, ""])
def test_an_empty_root_of_runs_counts_as_not_set(
    value: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("STEPSCOPE_RUNS", raising=False)
    if value is not None:
        monkeypatch.setenv("STEPSCOPE_RUNS", value)
    assert runs_root() == tmp_path / "runs"
    monkeypatch.setenv("STEPSCOPE_RUNS", "mine")
    assert (runs_root(), runs_root(Path("theirs"))) == (tmp_path / "mine", tmp_path / "theirs")


def test_an_end_is_noted_only_of_a_run_that_has_not_said_its_own(tmp_path: Path) -> None:
    pending, finished = make_run(tmp_path, status="pending"), make_run(tmp_path, status="finished")
    for folder in (pending, finished):
        note_end(folder, RunStatus.STOPPED, "It never began.")
    assert (read_run(pending).status, read_run(pending).reason) == ("stopped", "It never began.")
    assert (read_run(finished).status, read_run(finished).reason) == ("finished", None)
