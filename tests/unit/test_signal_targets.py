"""Only a process that has a file of the run folder open for writing is sent a signal."""

from __future__ import annotations

import json
import os
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from dashboard.sweeps import Sweeps
from stepscope.lab.folder import LOCK, PLAN_JSON, SWEEP_JSON, SweepError
from stepscope.run import STALE_S, RunStatus, process_identity, read_run, write_run_json
from stepscope.run.folder import recorder_of
from stepscope.session import stop
from stepscope.session.stop import end_job
from tests.support.child_process import holding
from tests.support.fake_sweep import sweep

SWEEP = "20261122-061500-digits-mlp-ab12"


@pytest.fixture
def innocent() -> Iterator[subprocess.Popen[bytes]]:
    """A process that records nothing, but has another file open for writing."""
    with holding("/dev/null", "wb") as process:
        yield process


@pytest.fixture
def script(tmp_path: Path) -> Iterator[subprocess.Popen[bytes]]:
    """A process that records into the folder of `run_that_names`."""
    (tmp_path / "run").mkdir()
    with holding(tmp_path / "run" / "rank0.sqlite") as process:
        yield process


def facts_of(process: subprocess.Popen[bytes]) -> dict[str, Any]:
    return process_identity(process.pid) | {"kind": "watch"}


def run_that_names(root: Path, *, old: bool = True, **facts: Any) -> Path:
    folder = root / "run"
    folder.mkdir(exist_ok=True)
    beat = time.time() - 2 * STALE_S if old else time.time()
    write_run_json(folder, {"created": 1.0, "status": "running", "heartbeat": beat, **facts})
    if old:
        os.utime(folder / "run.json", (beat, beat))
    return folder


def make_sweep(root: Path, process: subprocess.Popen[bytes]) -> Path:
    folder = root / "lab" / SWEEP
    folder.mkdir(parents=True, exist_ok=True)
    (folder / PLAN_JSON).write_text("{}")
    facts = {**facts_of(process), "status": "running", "id": SWEEP}
    (folder / SWEEP_JSON).write_text(json.dumps(sweep(**facts)))
    return folder


def test_no_process_is_killed_that_may_be_another(
    tmp_path: Path, script: subprocess.Popen[bytes]
) -> None:
    others: list[dict[str, Any]] = [
        *({"pid_ticks": 5}, {"user": "eve"}, {"host": "elsewhere"}),
        *({"pid_namespace": "elsewhere"}, {"status": "finished"}),
    ]
    for other in others:
        folder = run_that_names(tmp_path, **(facts_of(script) | other))
        before = read_run(folder).run_json
        assert "no process of this host and user" in end_job(read_run(folder)), other
        assert script.poll() is None
        assert read_run(folder).run_json == before


def test_a_parent_that_starts_no_ranks_is_no_launcher(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As that of a rank whose torchrun was killed."""
    monkeypatch.setenv(stop.LAUNCH_ID, "none")
    with holding(tmp_path / "rank0.sqlite") as process:
        assert stop._launcher(psutil.Process(process.pid)) is None


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_copied_folder_that_names_another_process_signals_nothing(
    tmp_path: Path, innocent: subprocess.Popen[bytes], ranks: int
) -> None:
    folder = run_that_names(tmp_path, **facts_of(innocent), world_size=ranks)
    (folder / "rank0.sqlite").write_bytes(b"")
    before = read_run(folder).run_json
    assert f"kill -9 {innocent.pid}" in end_job(read_run(folder))  # what the user can do
    assert innocent.poll() is None
    assert read_run(folder).run_json == before


def test_a_job_is_killed_except_for_a_foreign_process(
    tmp_path: Path, script: subprocess.Popen[bytes], innocent: subprocess.Popen[bytes]
) -> None:
    folder = run_that_names(tmp_path, **facts_of(script), world_size=2, rank=0)
    second = {"status": "running", "heartbeat": time.time(), **facts_of(innocent), "rank": 1}
    write_run_json(folder, second, "rank1.json")
    said = end_job(read_run(folder))
    assert not psutil.pid_exists(script.pid)
    assert innocent.poll() is None
    assert f"kill -9 {innocent.pid}" in said
    assert read_run(folder).status is RunStatus.STOPPED


def test_the_lab_stops_the_lock_holder(tmp_path: Path, innocent: subprocess.Popen[bytes]) -> None:
    folder = make_sweep(tmp_path, innocent)
    (folder / LOCK).write_bytes(b"")
    with pytest.raises(SweepError, match="its process was not found"):
        Sweeps(tmp_path, tmp_path / "examples").stop(SWEEP, timeout_s=0.1)
    assert innocent.poll() is None
    with holding(folder / LOCK) as process:
        make_sweep(tmp_path, process)
        Sweeps(tmp_path, tmp_path / "examples").stop(SWEEP)
        assert not psutil.pid_exists(process.pid)


@pytest.mark.parametrize(
    "made", ["missing", "link", "second name", "FIFO", "only read", "another user", "its own"]
)
def test_the_recorder_has_the_file_open_for_writing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, made: str
) -> None:
    file, log = tmp_path / "rank0.sqlite", tmp_path / "log"
    log.write_bytes(b"")
    if made == "link":
        file.symlink_to(log)
    elif made == "second name":
        file.hardlink_to(log)
    elif made == "FIFO":
        os.mkfifo(file)
    elif made != "missing":
        file.write_bytes(b"")
    other = made in ("missing", "link", "second name")
    mode = {"FIFO": "r+b", "only read": "rb"}.get(made, "ab")
    with holding(log if other else file, mode) as process:
        if made == "another user":
            monkeypatch.setattr(os, "getuid", lambda: 12345)
        recorder = recorder_of(facts_of(process), file)
        assert recorder == (psutil.Process(process.pid) if made == "its own" else None)
