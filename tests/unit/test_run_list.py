"""The list of runs is current, and a scan reads only what may have changed."""

from __future__ import annotations

import os
import shutil
import time
from pathlib import Path
from typing import Any

import pytest

from dashboard import run_list
from dashboard.api.routes import page_token
from dashboard.controls.run_picker import newest_live
from dashboard.run_list import RunList
from stepscope.run import RunStatus, process_identity, read_run, write_run_json
from stepscope.run.info import edit_notes
from stepscope.store import STORE_NAME

LONG_AGO = 1_000.0
MIRROR = {"source": "h:/r", "age_s": 1.0, "alive": None, "received": 1.0, "reason": None}


def write(root: Path, name: str, status: str = "running", **run_info: Any) -> Path:
    folder = root / name
    folder.mkdir(parents=True, exist_ok=True)
    now = time.time()
    known = {"name": name, "status": status, "created": now, "heartbeat": now}
    write_run_json(folder, known | process_identity() | run_info)
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

    monkeypatch.setattr(run_list, "read_run", counted)
    return seen


def ids(runs: RunList) -> list[str]:
    return [run.id for run in runs.fresh().runs]


def test_live_runs_come_first_then_the_newest(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, status in (("b", "finished"), ("2", "running"), ("1", "paused"), ("a", "failed")):
        write(tmp_path, name, status, created={"1": 1.0, "2": 2.0, "b": 3.0, "a": 4.0}[name])
    assert ids(RunList(tmp_path)) == ["2", "1", "a", "b"]
    monkeypatch.setattr(run_list, "MAX_LISTED", 2)
    runs = RunList(tmp_path)
    assert ids(runs) == ["a", "b"], "the newest by name"
    assert len(runs.rows()) == 4
    assert ids(runs) == ["2", "1", "a", "b"], "and live ones that are known"


def test_a_scan_reads_live_and_changed_runs_only(tmp_path: Path, reads: list[str]) -> None:
    for name in "abc":
        age(write(tmp_path, name, "finished"))
    age(tmp_path)
    runs = RunList(tmp_path)
    first = runs.fresh()
    write(tmp_path, "live")
    assert sorted(ids(runs)) == ["a", "b", "c", "live"]
    for _ in range(100):  # polls of many tabs
        runs.recent(max_age_s=3600)
    assert (reads.count("a"), reads.count("live")) == (1, 1)
    runs.recent(max_age_s=0)
    assert (reads.count("a"), reads.count("live")) == (1, 2)
    edit_notes(tmp_path / "a", name="renamed")  # by another server
    second = runs.fresh()
    assert {run.run_json["name"] for run in second.runs} == {"renamed", "b", "c", "live"}
    assert second.version != first.version
    age(tmp_path / "a")
    runs.fresh()
    reads.clear()
    runs.fresh()
    runs.rows()
    assert reads == ["live", "live"]


def test_the_version_changes_with_the_status_of_a_run(tmp_path: Path) -> None:
    runs = RunList(tmp_path / "runs")
    versions = [runs.fresh().version]  # no such folder yet
    for status in (RunStatus.PENDING, RunStatus.RUNNING, RunStatus.FINISHED):
        write(tmp_path / "runs", "a", status)
        versions.append(runs.fresh().version)
        assert runs.fresh().version == versions[-1]
    shutil.rmtree(tmp_path / "runs" / "a")
    assert len(set(versions)) == 4
    assert runs.fresh().version == versions[0]


def test_a_crashed_run_of_another_host_recovers(tmp_path: Path, reads: list[str]) -> None:
    far = write(tmp_path, "far", host="elsewhere", heartbeat=LONG_AGO)
    age(far / "run.json", far, tmp_path)
    runs = RunList(tmp_path)
    for _ in range(3):
        assert runs.fresh().runs[0].status is RunStatus.CRASHED
    assert reads == ["far"]
    write(tmp_path, "far", host="elsewhere")
    assert runs.fresh().runs[0].status is RunStatus.RUNNING


def test_the_store_of_a_mirrored_run_grows_in_place(tmp_path: Path, reads: list[str]) -> None:
    folder = write(tmp_path, "far", "finished", host="elsewhere", mirror=MIRROR)
    (folder / STORE_NAME).write_bytes(b"x")
    age(folder / STORE_NAME, folder, tmp_path)
    runs = RunList(tmp_path, mirrors=[tmp_path])
    for _ in range(2):
        assert runs.rows()[0].cells["Size"] is None, "a part of its files is here"
    assert reads == ["far"]
    os.utime(folder / STORE_NAME, (2 * LONG_AGO, 2 * LONG_AGO))
    runs.rows()
    assert reads == ["far", "far"]


def test_unreadable_runs_are_named_hide_no_other_and_are_logged_once(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    reads: list[str],
) -> None:
    write(tmp_path, "odd", world_size=2, local_rank=0, local_world_size=10**30, folder_of="host")
    for name, content in (("broken", "{"), ("nested", "[" * 100_000)):
        (write(tmp_path, name) / "run.json").write_text(content)
    (tmp_path / "file").write_text("x")
    (tmp_path / "folder").mkdir()
    (tmp_path / ".hidden").mkdir()
    write(tmp_path, "worse")
    write(tmp_path, "good", config={"\x1b[2J": "x", "l": [1], "n": 2**80}, tags=[{}], final=[1])
    make = run_list.row_of

    def fail(run: Any, size: int | None) -> Any:
        return 1 / 0 if run.id == "rowless" else make(run, size)

    age(write(tmp_path, "rowless", "finished"))
    monkeypatch.setattr(run_list, "row_of", fail)
    runs = RunList(tmp_path)
    for _ in range(3):
        assert {"good", "odd"} <= set(ids(runs))
        assert {row.id for row in runs.rows()} == {"good", "odd"}
    assert len(caplog.records) == 4
    for name, text in zip(
        ("broken", "nested", "rowless", "worse"), sorted(runs.unreadable()), strict=True
    ):
        assert name in text


def test_rows_are_sorted_and_a_change_is_in_the_next_ones(tmp_path: Path) -> None:
    for name, created in (("a", 5.0), ("b", 4.0), ("c", 3.0)):
        write(tmp_path, name, "finished", created=created, heartbeat=created, ended=created + 60)
    write(tmp_path, "live")
    runs = RunList(tmp_path)
    assert [row.id for row in runs.rows()] == ["live", "a", "b", "c"]
    edit_notes(tmp_path / "b", name="renamed", tags=("kept",), pinned=True)
    rows = runs.rows()
    assert [row.id for row in rows] == ["live", "b", "a", "c"]
    assert (rows[1].cells["Name"], rows[1].cells["Tags"]) == ("renamed", "kept")
    (tmp_path / "b").rename(tmp_path.with_name("elsewhere"))
    assert [row.id for row in runs.rows()] == ["live", "a", "c"]


def test_a_page_takes_the_newest_live_run_of_this_machine_ours_first(tmp_path: Path) -> None:
    runs = RunList(tmp_path)
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
        assert newest_live(runs.fresh().runs) == newest


def test_the_token_of_a_page_changes_with_what_the_page_is_built_from(tmp_path: Path) -> None:
    folder = write(tmp_path, "a", step=1, heartbeat=time.time())
    runs = RunList(tmp_path)

    def token(busy: str | None = None) -> str:
        return page_token(runs.fresh(), read_run(folder), busy)

    seen = [token(), token("A sweep is measuring.")]
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
    seen += [token(), page_token(runs.fresh(), None)]
    assert len(set(seen)) == len(seen)
