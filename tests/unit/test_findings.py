"""The list of what there is to say about a run, and `stepscope diagnose`, which prints it."""

from __future__ import annotations

import json
import os
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from stepscope.cli import main
from stepscope.diagnosis.findings import Finding, findings, read_recorded
from stepscope.run import RunStatus, read_run
from stepscope.store.recorder import Recorder
from tests.support.recorded_runs import Row, recorded_run, write_run, write_slow_job
from tests.support.train_devices import SIMULATED


def diagnose(capsys: pytest.CaptureFixture[str], *words: str, code: int = 0) -> tuple[str, str]:
    """Run `stepscope diagnose`; return its output and its errors."""
    assert main(["diagnose", *words]) == code
    said = capsys.readouterr()
    return said.out, said.err


def found_in(folder: Path) -> list[Finding]:
    return findings(read_recorded(read_run(folder)))


@pytest.fixture
def runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("STEPSCOPE_RUNS", str(tmp_path))
    return tmp_path


def ended(root: Path, kind: str, reason: str, config: dict[str, Any], **more: Any) -> Path:
    """A run that failed with an event of this kind."""
    folder = root / "r"
    folder.mkdir()
    recorder = Recorder(folder, name="r", config=config)
    recorder.log(1, {"train/loss": more.get("loss", 1.0)})
    if kind:
        recorder.event(kind, reason)
    recorder.close(more.get("status", RunStatus.FAILED), reason)
    return folder


def steps(wait: float, count: int = 60) -> list[Row]:
    values = {"perf/step_time": 0.1, "perf/data_wait": wait}
    return [(0.1 * i, i, values) for i in range(1, count)]


BUSY: list[Row] = [(0.1 * i, 0, {"process/cpu": 100.0}) for i in range(60)]


def test_a_slow_loader_is_found(runs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    recorded_run(runs, "input_bound_cpu")
    out, _ = diagnose(capsys, "input_bound_cpu", "--json")
    (finding,) = json.loads(out)
    assert (finding["kind"], finding["rank"], finding["phase"]) == ("input-bound", 0, "data")
    assert finding["share"] >= 0.8


def test_a_young_run_is_an_empty_list_and_a_sentence(
    runs: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_run(runs / "young", steps=steps(0.06, count=10))
    out, err = diagnose(capsys, "young", "--json")
    assert json.loads(out) == []
    assert "fewer steps" in err


def test_a_run_without_a_store_has_no_findings(tmp_path: Path) -> None:
    begun = write_run(tmp_path / "begun")
    (begun / "rank0.sqlite").unlink()  # its process is just making the store
    assert findings(read_recorded(read_run(begun))) == []


def test_a_failure_proposes_a_setting_and_a_broken_loss_is_found_in_a_run_that_goes_on(
    tmp_path: Path,
) -> None:
    text = "The loss is nan at step 1. Lower learning_rate."
    folder = ended(tmp_path, "error", text, {"learning_rate": 1e-3}, loss=float("nan"))
    (finding,) = found_in(folder)
    assert (finding.kind, finding.text) == ("loss-not-finite", text)
    assert finding.setting == {"field": "learning_rate", "value": pytest.approx(1e-4)}
    (tmp_path / "oom").mkdir()
    (finding,) = found_in(ended(tmp_path / "oom", "oom", "The GPU.", {"batch_size": 64}))
    assert finding.kind == "out-of-memory"
    assert finding.setting == {"field": "batch_size", "value": 32}
    (tmp_path / "other").mkdir()
    on = ended(tmp_path / "other", "", "", {}, loss=float("nan"), status=RunStatus.FINISHED)
    assert [one.kind for one in found_in(on)] == ["loss-not-finite"]


def test_another_failure_has_its_reason_and_a_stop_is_no_finding(tmp_path: Path) -> None:
    folder = ended(tmp_path, "error", "KeyError: 'x'", {})
    (folder / "output.log").write_text("KeyError")
    (finding,) = found_in(folder)
    assert (finding.kind, finding.text) == ("failed", "KeyError: 'x'")
    assert "output.log" in (finding.next or "")
    (folder / "output.rank1.log").write_text("ValueError")
    of_rank_1 = replace(read_run(folder), cause=1)
    (finding,) = findings(replace(read_recorded(read_run(folder)), run=of_rank_1))
    assert "output.rank1.log" in (finding.next or "")
    (tmp_path / "other").mkdir()
    assert not found_in(ended(tmp_path / "other", "", "", {}, status=RunStatus.STOPPED))


def test_a_killed_run_is_found_with_the_steps_it_left(
    runs: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    long_ago = time.time() - 100
    gone = {"status": "running", "heartbeat": long_ago, "pid": 2**22 + 1}
    folder = write_run(runs / "killed", gone, steps=steps(0.06))
    os.utime(folder / "run.json", (long_ago, long_ago))
    out, _ = diagnose(capsys, "killed", "--json")
    kinds = [finding["kind"] for finding in json.loads(out)]
    assert kinds == ["crashed", "input-bound"]


def test_each_rank_has_findings_of_its_own(runs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = write_run(runs / "r", {"world_size": 2, "rank": 0}, steps=steps(0.001), samples=BUSY)
    write_run(folder, rank=1, steps=steps(0.06))
    now = time.time()
    told = {"created": now, "status": "finished", "heartbeat": now, "rank": 1, "world_size": 2}
    (folder / "rank1.json").write_text(json.dumps(told))
    out, _ = diagnose(capsys, "r", "--json")
    each = [(finding["rank"], finding["kind"]) for finding in json.loads(out)]
    assert each == [(0, "compute-bound"), (1, "input-bound")]


def test_what_cannot_be_read_is_a_sentence_on_stderr(
    runs: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert diagnose(capsys, "nowhere", code=2)[0] == ""
    folder = write_run(runs / "broken", steps=steps(0.06))
    (folder / "rank0.sqlite").write_bytes(b"no database, but long enough to look like one" * 99)
    out, err = diagnose(capsys, "broken", "--json", code=1)
    assert out == ""
    assert err.startswith("broken: ")


def test_simulated_times_make_no_straggler(tmp_path: Path) -> None:
    found = found_in(write_slow_job(tmp_path / "cpu", "cpu"))
    assert [(one.kind, one.rank, one.phase) for one in found] == [("straggler", 1, "forward")]
    folder = write_slow_job(tmp_path / "gpu", SIMULATED.id)
    assert found_in(folder) == []
