"""A run's status follows from its folder, and untrusted names cannot leave the root."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

from stepscope.run import (
    RunError,
    RunStatus,
    read_run,
    run_folder,
    run_folders,
    runs_root,
    write_run_json,
)
from stepscope.store.writer import note_end
from tests.support.run_folders import make_run

GONE = {"pid": 2**22 + 1}
FAR = {"host": "elsewhere"}
BOXED = {"pid_namespace": "another boot/4026531836"}  # equal pid and start time by chance
UNKNOWN = {"pid_namespace": None}


@pytest.mark.parametrize(
    ("about", "fresh", "old"),
    [
        ({}, "running", "running"),  # a live process, independent of its heartbeat
        (GONE, "crashed", "crashed"),
        ({"pid_ticks": 5}, "crashed", "crashed"),
        ({"pid": "x"}, "crashed", "crashed"),
        (FAR, "running", "crashed"),
        # Two containers with one host name and one folder of runs number their processes alike.
        (BOXED, "running", "crashed"),
        (BOXED | GONE, "running", "crashed"),
        (UNKNOWN, "running", "crashed"),
        (UNKNOWN | GONE, "running", "crashed"),
    ],
)
def test_the_status_of_a_live_or_crashed_run(
    tmp_path: Path, about: dict[str, Any], fresh: str, old: str
) -> None:
    for is_old, status in ((False, fresh), (True, old)):
        run = read_run(make_run(tmp_path, old=is_old, **about))
        assert run.status == status
        assert ("gone without" in str(run.reason)) == (status == "crashed")


def test_a_touched_file_is_a_heartbeat_on_a_full_disk(tmp_path: Path) -> None:
    folder = make_run(tmp_path, host="elsewhere", old=True)
    os.utime(folder / "run.json")
    assert read_run(folder).status is RunStatus.RUNNING


@pytest.mark.parametrize(
    "text",
    [*("", "[]", "{}", "[" * 10**6), '{"status": "odd", "heartbeat": 1, "created": 1}'],
)
def test_a_corrupt_run_json_is_refused_in_a_sentence(tmp_path: Path, text: str) -> None:
    folder = make_run(tmp_path)
    (folder / "run.json").write_text(text)
    with pytest.raises(RunError, match="not a Stepscope run"):
        read_run(folder)


@pytest.mark.parametrize(
    "name",
    [*("", ".", "..", "../x", "a/b", "/etc", "-x", "a\0b", "x" * 200, "nothing"), "link", "circle"],
)
def test_a_hostile_run_name_is_refused(tmp_path: Path, name: str) -> None:
    (tmp_path / "x").mkdir()
    (tmp_path / "root").mkdir()
    (tmp_path / "root" / "link").symlink_to(make_run(tmp_path / "outside"))
    (tmp_path / "root" / "circle").symlink_to(tmp_path / "root" / "circle")
    with pytest.raises(RunError):
        run_folder(tmp_path / "root", name)


@pytest.mark.parametrize("version", [0, 2, "1"])
def test_run_json_of_another_version_is_refused_in_a_sentence(tmp_path: Path, version: Any) -> None:
    folder = make_run(tmp_path, "other", schema=version, status="finished")
    with pytest.raises(RunError, match=f"version {version!r} "):
        read_run(folder)
    before = (folder / "run.json").read_bytes()
    note_end(folder, RunStatus.FAILED, "no", instead_of=(RunStatus.FINISHED,))
    assert (folder / "run.json").read_bytes() == before


def test_run_folders_are_listed_newest_first(tmp_path: Path) -> None:
    (tmp_path / "notes").mkdir()
    for name in ("20260101-a", "20260102-b"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "run.json").touch()
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


def test_an_empty_root_of_runs_counts_as_not_set(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("STEPSCOPE_RUNS", "")
    assert runs_root() == tmp_path / "runs"
    monkeypatch.setenv("STEPSCOPE_RUNS", "mine")
    assert (runs_root(), runs_root(Path("theirs"))) == (tmp_path / "mine", tmp_path / "theirs")


def test_an_outcome_is_written_only_over_a_live_status(tmp_path: Path) -> None:
    pending, finished = make_run(tmp_path, status="pending"), make_run(tmp_path, status="finished")
    for folder, status in ((pending, "stopped"), (finished, "finished")):
        note_end(folder, RunStatus.STOPPED, "It never began.")
        assert read_run(folder).status == status
