"""`stepscope gc` deletes old runs and nothing else."""

from __future__ import annotations

import json
import os
import shutil
import time
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

import stepscope
from stepscope import tracker
from stepscope.cli import gc, main
from stepscope.run import RunError, process_identity, read_run, retention
from stepscope.run.info import NOTES_JSON, edit_notes
from stepscope.run.retention import DAY_S, StoredRun, decide, folder_size
from tests.support.run_folders import make_run

GONE = {"pid": 2**22 + 1}
NOW = 1e9


@pytest.fixture
def runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of all runs."""
    root = tmp_path / "runs"
    root.mkdir()
    monkeypatch.setenv("STEPSCOPE_RUNS", str(root))
    return root


def ended(root: Path, name: str, days: float = 50, size: int = 1000, **run_info: Any) -> Path:
    """Make a run that ended some days ago; `size` bytes are added to it."""
    about = {"status": "finished", "ended": time.time() - days * DAY_S, **GONE, **run_info}
    folder = root / name
    os.rename(make_run(root, name, **about), folder)
    (folder / "best.pt").write_bytes(b"x" * size)
    return folder


def names(root: Path) -> set[str]:
    return set(os.listdir(root))


def kept(root: Path, *words: str, days: float = 0) -> set[str]:
    """Return what `stepscope gc` leaves in the folder."""
    assert main(["gc", "--keep-days", str(days), *words]) == 0
    return names(root)


stored = st.builds(
    StoredRun,
    st.uuids().map(str),
    st.integers(0, 1000),
    st.floats(NOW - 100 * DAY_S, NOW),
    st.sampled_from([None, None, "live"]),
)


@given(
    st.lists(stored, max_size=20),
    st.none() | st.integers(0, 100).map(float),  # whole days: no rounding at the boundary
    st.none() | st.integers(0, 10_000),
)
def test_a_plan_keeps_what_is_protected_and_deletes_the_oldest_of_the_rest(
    found: list[StoredRun], keep_days: float | None, max_bytes: int | None
) -> None:
    decisions = decide(found, NOW, keep_days, max_bytes)
    assert sorted(decision.run.id for decision in decisions) == sorted(run.id for run in found)
    assert all(decision.reason for decision in decisions)
    deleted = [decision.run for decision in decisions if decision.delete]
    oldest = NOW - (keep_days or 0) * DAY_S
    free = [run for run in found if run.protected is None and run.ended <= oldest]
    by_age = sorted(free, key=lambda run: (run.ended, run.id))
    assert deleted == by_age[: len(deleted)]
    left = sum(run.size for run in found) - sum(run.size for run in deleted)
    if max_bytes is None:
        assert len(deleted) == len(free)
    else:
        assert left <= max_bytes or len(deleted) == len(free)
        assert not deleted or left + deleted[-1].size > max_bytes, "one more than necessary"


def test_old_runs_are_deleted_and_their_sizes_printed(
    runs: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    ended(runs, "old", 31, 3 * 2**20)
    ended(runs, "new", 29)
    ended(runs, "tagged", tags=["paper", "\x1b[2J"])
    assert kept(runs, "--keep-tagged", "--dry-run", days=30) == {"old", "new", "tagged"}
    dry = capsys.readouterr().out
    assert kept(runs, "--keep-tagged", days=30) == {"new", "tagged"}
    out = capsys.readouterr().out
    assert out.splitlines()[:-1] == dry.splitlines()[:-1]
    lines = {line.split()[1]: line for line in out.splitlines()[:-1]}
    assert lines["old"].split()[:4] == ["delete", "old", "3.00", "MiB"]
    assert lines["new"].startswith("keep")
    assert "paper" in lines["tagged"]
    assert "\x1b" not in out
    assert kept(runs, days=30) == {"new"}


LIVE: dict[str, dict[str, Any]] = {
    "running": {"status": "running", **process_identity()},
    "last-rows-are-written": process_identity(),
    "crashed-elsewhere": {"status": "running", "host": "node7", "heartbeat": 1.0},
    "crashed-in-a-container": {"status": "running", "pid_namespace": "x/1", "heartbeat": 1.0},
    "other-user": {"user": "ada"},
}


@pytest.mark.parametrize("name", LIVE)
def test_a_run_that_may_be_live_is_never_deleted(runs: Path, name: str) -> None:
    folder = ended(runs, name, **LIVE[name])
    ended(runs, "crashed-here", status="running", heartbeat=1.0)
    ended(runs, "finished-elsewhere", host="node7")
    long_ago = time.time() - 50 * DAY_S
    for path in runs.glob("*/run.json"):
        os.utime(path, (long_ago, long_ago))
    if name == "running":
        os.utime(folder / "run.json")
    with (folder / "rank0.sqlite").open("ab"):
        assert kept(runs) == {name}


def test_a_run_with_another_live_rank_is_never_deleted(runs: Path) -> None:
    folder = ended(runs, "job", world_size=2)
    own = read_run(folder).run_json | {"rank": 1, "status": "running", "host": "node7"}
    (folder / "rank1.json").write_text(json.dumps(own))
    assert kept(runs) == {"job"}


@pytest.mark.parametrize("name", ["rank1.json", NOTES_JSON])
@pytest.mark.parametrize("content", ["[]", None])
def test_a_run_with_a_file_that_cannot_be_read_stays(
    runs: Path, name: str, content: str | None
) -> None:
    path = ended(runs, "job", world_size=2) / name
    if content is None:
        path.symlink_to(runs / "absent")
    else:
        path.write_text(content)
    assert kept(runs) == {"job"}
    assert read_run(path.parent).id == "job", "it is shown"
    if name == NOTES_JSON:
        with pytest.raises(RunError, match="cannot be read"):
            edit_notes(path.parent, name="x")
        assert content is None or path.read_text() == content


@pytest.mark.parametrize("crashed_rank", [None, 0, 1])
def test_a_run_ends_with_its_last_rank_or_the_last_heartbeat(
    runs: Path, crashed_rank: int | None
) -> None:
    crashed = {"status": "running", "ended": None}
    folder = ended(runs, "job", 2.0, world_size=2, heartbeat=time.time() - 2 * DAY_S)
    own = json.loads((folder / "run.json").read_text())
    early = own | {"ended": time.time() - 9 * DAY_S, "heartbeat": 1.0}
    last = own if crashed_rank is None else own | crashed
    for rank, name in enumerate(("run.json", "rank1.json")):
        known = last if rank == (crashed_rank or 0) else early
        (folder / name).write_text(json.dumps(known | {"rank": rank}))
        os.utime(folder / name, (1.0, 1.0))
    assert kept(runs, days=2.5) == {"job"}
    assert kept(runs, days=1.5) == set()


def test_a_run_that_becomes_live_or_is_gone_meanwhile(
    runs: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    live, gone = ended(runs, "again"), ended(runs, "gone", 60)
    ended(runs, "other")

    def decided(*arguments: Any) -> Any:
        decisions = decide(*arguments)
        run_json = json.loads((live / "run.json").read_text())
        (live / "run.json").write_text(json.dumps(run_json | LIVE["running"]))
        shutil.rmtree(gone)
        return decisions

    monkeypatch.setattr(gc.retention, "decide", decided)
    assert kept(runs) == {"again"}


def test_nothing_outside_of_the_runs_folder_is_touched(runs: Path, tmp_path: Path) -> None:
    outside = ended(tmp_path, "outside")
    (runs / "link").symlink_to(outside)
    os.rename(ended(runs, "x"), runs / "..x")  # no name of a run
    (runs / "lab").mkdir()
    (runs / "lab" / "plan.json").write_text("{}")
    (runs / "torn").mkdir()
    (runs / "torn" / "run.json").write_text("{")
    inner = ended(runs, "inner")
    (runs / "alias").symlink_to(inner)
    (inner / "data").symlink_to(outside)
    (inner / "deep" / "deeper").mkdir(parents=True)
    before = names(runs)
    assert kept(runs) == before - {"inner"}
    assert names(outside) == {"run.json", "best.pt"}


def test_a_failed_deletion_is_reported_and_half_a_run_is_not_listed(
    runs: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    ended(runs, "half")

    def fail(path: Path) -> None:
        raise PermissionError(13, "not permitted", str(path))

    with monkeypatch.context() as patched:
        patched.setattr(retention.shutil, "rmtree", fail)
        assert main(["gc", "--keep-days", "0"]) == 1
    out, err = capsys.readouterr()
    assert "0 B of " in out
    assert "not permitted" in err
    assert main(["runs"]) == 0
    assert "No runs" in capsys.readouterr().out


def test_wrong_usage_deletes_nothing(
    runs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    ended(runs, "old")
    assert main(["gc"]) == main(["gc", "--dry-run"]) == 2
    for words in (["--max-size", "20"], ["--max-size", "-1GB"], ["--keep-days", "-1"]):
        with pytest.raises(SystemExit, match="2"):
            main(["gc", *words])
    assert names(runs) == {"old"}
    monkeypatch.setenv("STEPSCOPE_RUNS", str(tmp_path / "absent"))
    assert main(["gc", "--keep-days", "0"]) == 2
    assert "absent" in capsys.readouterr().err


def test_tags_of_a_later_call_are_added(runs: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As under `stepscope watch`, which has begun the run before the script calls `init`."""
    monkeypatch.setattr(tracker, "_current", None)
    with stepscope.init("demo", tags=["paper"], sample=False) as recording:
        assert stepscope.init(tags=["final", "paper"]) is recording
        assert recording.session is not None
        watched = tracker.attach(recording.session)
        assert stepscope.init(tags="watched") is watched
        stepscope.init()
    assert recording.folder is not None
    assert read_run(recording.folder).run_json["tags"] == ["paper", "final", "watched"]


def test_pinned_runs_stay_and_tags_of_the_user_count(runs: Path) -> None:
    for name in ("pinned", "tagged", "untagged", "other"):
        ended(runs, name, tags=["x"] if name == "untagged" else [])
    edit_notes(runs / "pinned", pinned=True)
    edit_notes(runs / "tagged", tags=("kept",))
    edit_notes(runs / "untagged", tags=())
    assert kept(runs, "--keep-tagged") == {"pinned", "tagged"}


def test_the_size_of_a_folder_has_all_files_and_follows_no_link(runs: Path) -> None:
    (runs / "a" / "b").mkdir(parents=True)
    for name, size in (("a/one", 10), ("a/b/two", 5), ("large", 1000)):
        (runs / name).write_bytes(bytes(size))
    link = runs / "a" / "link"
    link.symlink_to(runs / "large")
    assert folder_size(runs / "a") == 15 + link.lstat().st_size
