"""A run folder of another user: special files, false values, other owners and links."""

from __future__ import annotations

import codecs
import io
import json
import os
import pickle
import shutil
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch

from dashboard import crash_watch
from dashboard.charts.layout import layout
from dashboard.charts.run_view import run_content, state
from dashboard.crash_watch import CrashWatch
from dashboard.run_files import ProfileFiles, file_content, profile_summary, tail
from dashboard.run_list import RunList
from dashboard.run_rows import cells_of
from dashboard.sweeps import Sweeps
from stepscope.alerts.monitor import report_crash
from stepscope.alerts.settings import AlertSettings
from stepscope.cli import main
from stepscope.lab.folder import (
    SweepError,
    only_one,
    read_plan,
    read_sweep,
    read_trials,
    sweep_folders,
)
from stepscope.recorded_run import Run
from stepscope.remote.access import read_only_reason
from stepscope.run import (
    RunError,
    RunStatus,
    read_run,
    run_folder,
    run_folders,
)
from stepscope.session.consensus import Proposal
from stepscope.session.job_commands import read_file
from stepscope.store.ring import RingBuffer
from stepscope.store.writer import note_end, recover_ended
from tests.support.other_user import NOBODY, not_root, reachable_folder
from tests.support.recorded_runs import write_run
from trainer.config import checkpoints
from trainer.runners.child_process import log_text
from trainer.training.checkpoint import CheckpointError, read_checkpoint

KINDS = ("fifo", "device", "link", "folder", "sparse")


def make_special(path: Path, kind: str) -> Path:
    """Make something other than a small file; its content begins with "secret"."""
    path.parent.mkdir(parents=True, exist_ok=True)
    if kind == "fifo":
        os.mkfifo(path)
    elif kind == "device":
        path.symlink_to("/dev/zero")
    elif kind == "link":
        secret = path.parent / "secret"
        secret.write_text("secret")
        path.symlink_to(secret)
    elif kind == "folder":
        path.mkdir()
    else:
        with path.open("wb") as file:
            file.truncate(30 * 2**30)
    return path


@pytest.fixture
def readable() -> Iterator[Path]:
    """Return a folder that every user can reach."""
    with reachable_folder() as folder:
        yield folder


@pytest.mark.parametrize("kind", KINDS)
def test_no_reader_waits_for_a_special_file_or_reads_all_of_a_large_one(
    tmp_path: Path, kind: str
) -> None:
    run = write_run(tmp_path / "run")
    make_special(run / "rank0.ring", kind)
    assert recover_ended(read_run(run)) == 0
    assert Run(run).metrics == ()
    proposals = make_special(run / "agreement" / "proposals.json", kind)
    assert read_file(proposals, list[Proposal]) is None
    assert "secret" not in log_text(make_special(run / "worker.log", kind))
    assert "secret" not in (tail(run / "worker.log") or "")
    for read, name in ((read_sweep, "sweep.json"), (read_plan, "plan.json")):
        make_special(tmp_path / "sweep" / name, kind)
        with pytest.raises(SweepError):
            read(tmp_path / "sweep")
    make_special(tmp_path / "sweep" / "trials.jsonl", kind)
    with pytest.raises(SweepError):
        read_trials(tmp_path / "sweep")
    if kind == "link":  # the incomplete last line of its target is not cut off
        assert (tmp_path / "sweep" / "secret").read_text() == "secret"


@pytest.mark.parametrize("kind", KINDS)
def test_no_download_and_no_checkpoint_is_a_special_file(tmp_path: Path, kind: str) -> None:
    profile = ProfileFiles(1, 2, None)
    for name in (profile.summary, profile.trace, "snapshot-1.pickle", "last.pt"):
        make_special(tmp_path / name, kind)
    for read in (
        lambda: profile_summary(tmp_path, profile),
        lambda: file_content(tmp_path / profile.trace),
        lambda: file_content(tmp_path / "snapshot-1.pickle"),
    ):
        with pytest.raises((OSError, ValueError)):
            read()
    with pytest.raises(CheckpointError):
        read_checkpoint(tmp_path / "last.pt")


class Maker:
    def __init__(self, *call: Any) -> None:
        self.call = call

    def __reduce__(self) -> Any:
        return self.call[0], self.call[1:]


def saved(**values: Any) -> bytes:
    file = io.BytesIO()
    torch.save({"format": "stepscope-checkpoint-1", **values}, file)
    return file.getvalue()


def test_a_checkpoint_that_inflates_or_exceeds_the_free_memory_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "last.pt"
    whole = saved(model={"weight": torch.zeros(1_000_000)})
    path.write_bytes(whole)
    assert read_checkpoint(path)["model"]["weight"].shape == (1_000_000,)
    packed = io.BytesIO()
    source = zipfile.ZipFile(io.BytesIO(whole))
    with zipfile.ZipFile(packed, "w", zipfile.ZIP_DEFLATED) as target:
        for entry in source.infolist():
            target.writestr(entry.filename, source.read(entry))
    for content in (
        packed.getvalue(),
        saved(model=Maker(bytearray, 10**8)),
        saved(model=Maker(codecs.encode, b"x", "hex")),
        whole[:-40],
        pickle.dumps({"format": "stepscope-checkpoint-1"}),
    ):
        path.write_bytes(content)
        with pytest.raises(CheckpointError):
            read_checkpoint(path)
    with path.open("wb") as file:  # an archive may follow other bytes
        file.truncate(2**40)
        file.seek(2**40)
        file.write(saved(model={"weight": torch.zeros(1)}))
    with pytest.raises(CheckpointError):
        read_checkpoint(path)


FALSE: list[dict[str, Any]] = [
    *({"created": value} for value in (1e308, float("nan"))),
    *({"heartbeat": value} for value in (1e400, "now")),
    *({"status": value} for value in ("asleep",)),
]


@pytest.mark.parametrize("false", FALSE)
def test_a_run_without_its_times_or_status_is_skipped(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    false: dict[str, Any],
) -> None:
    monkeypatch.setenv("STEPSCOPE_RUNS", str(tmp_path))
    write_run(tmp_path / "bad", false)
    write_run(tmp_path / "good")
    with pytest.raises(RunError, match=next(iter(false))):
        read_run(tmp_path / "bad")
    assert [run.id for run in RunList(tmp_path).fresh().runs] == ["good"]
    assert main(["runs", "--json"]) == 0
    assert [run["id"] for run in json.loads(capsys.readouterr().out)] == ["good"]


HOSTILE: tuple[Any, ...] = (
    *(True, -1, 10**400, 1e308, float("nan"), float("inf"), "", "x" * 10_000, "\ud800"),
    *({"x": [float("nan")], "y": [1], "slope": 1e400, "intercept": 0},),
    *([], [[]], [None], {}, {"a": {}}, {"x": [10**400]}, {"number": 10**30, "step": 10**400}),
)


def test_a_row_of_the_runs_page_holds_whatever_run_json_says(tmp_path: Path) -> None:
    written = json.loads(Path("examples/h100/run.json").read_text()) | {"ended": 1e9}
    written |= {"status": "finished", "created": 1e9, "heartbeat": 1e9, "world_size": 2}
    folder = write_run(tmp_path / "run")
    for name in written.keys() - {"created", "heartbeat", "schema", "status"}:
        for value in HOSTILE:
            (folder / "run.json").write_text(json.dumps(written | {name: value}))
            run = read_run(folder)
            assert type(cells_of(run, None)["Steps"]) in (int, type(None))
            json.dumps([state(run), layout(run_content(run))], allow_nan=False).encode()


@pytest.mark.parametrize("mode", [0o000, 0o444, 0o111])
def test_a_folder_that_cannot_be_read_costs_itself_only(
    readable: Path, mode: int, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("STEPSCOPE_RUNS", str(readable))
    for name in ("bad", "good"):
        folder = write_run(readable / name)
        (folder / "last.pt").write_bytes(b"")
        shutil.copytree(folder, readable / "lab" / name)
        (readable / "lab" / name / "plan.json").write_text("{}")
    for folder in (readable / "bad", readable / "lab" / "bad"):
        folder.chmod(mode)
    with not_root():
        shown = {folder.name for folder in run_folders(readable)}
        assert "good" in shown
        assert "good" in {folder.name for folder in sweep_folders(readable)}
        assert "good" in {run.id for run in RunList(readable).fresh().runs}
        assert "good/last.pt" in checkpoints(readable)
        assert Sweeps(readable, readable / "none").list_sweeps() == []
        assert main(["runs"]) == 0
        assert "good" in capsys.readouterr().out
        if "bad" not in shown:
            with pytest.raises(RunError):
                run_folder(readable, "bad")
            assert main(["diagnose", "bad"]) != 0
            assert "Traceback" not in capsys.readouterr().err
    readable.chmod(0)
    with not_root():
        with pytest.raises(RunError):
            list(run_folders(readable))
        assert checkpoints(readable) == []
    readable.chmod(0o755)


def crashed(folder: Path) -> Path:
    run = write_run(folder, {"status": "running", "pid": 2**22 + 1})
    RingBuffer(run / "rank0.ring").leave()
    return run


def test_nothing_is_written_into_a_folder_of_another_user(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = crashed(tmp_path / "run")

    def content() -> dict[str, tuple[int, int]]:
        states = {path.name: path.stat() for path in folder.iterdir()}
        return {name: (state.st_mtime_ns, state.st_size) for name, state in states.items()}

    before = content()
    run = read_run(folder)
    assert run.status is RunStatus.CRASHED
    assert read_only_reason(run) is None
    monkeypatch.setattr(os, "geteuid", lambda: NOBODY)
    assert read_only_reason(run) is not None
    assert recover_ended(run) == 0
    note_end(folder, RunStatus.STOPPED, "No.")
    assert not report_crash(run, AlertSettings(path=Path("alerts.toml")))
    with pytest.raises(SweepError), only_one(folder):
        pytest.fail("a sweep of another user was opened")
    assert content() == before


def test_a_crash_whose_alert_fails_hides_no_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    for name in ("one", "two", "three"):
        crashed(tmp_path / name)

    def tell(run: Any, settings: AlertSettings) -> Any:
        if run.id == "two":
            raise RuntimeError("an unexpected error")
        return True

    monkeypatch.setattr(crash_watch, "report_crash", tell)
    watch = CrashWatch(RunList(tmp_path))
    settings = AlertSettings(path=tmp_path / "alerts.toml")
    load = Mock(side_effect=[OSError("an error of the disk"), *[settings] * 3])
    monkeypatch.setattr(crash_watch, "load", load)
    with pytest.raises(OSError, match="an error of the disk"):
        watch.check_runs()
    assert sorted(watch.check_runs()) == ["one", "three"]
    assert watch.check_runs() == []
    assert len(caplog.records) == 1
