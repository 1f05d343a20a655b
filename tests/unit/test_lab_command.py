"""`python -m trainer.lab` on a folder that holds a sweep already."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from trainer.config import Workload, defaults
from trainer.lab.__main__ import FAILED, FINISHED, USAGE, main
from trainer.lab.arms import Arm
from trainer.lab.folder import PLAN_JSON, SWEEP_JSON, only_one, read_sweep, write_plan
from trainer.lab.plan import Plan


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return the folder of a sweep whose workload, a user's own file, is not given here."""
    monkeypatch.setattr("trainer.lab.__main__.signal.signal", lambda *given: None)
    arms = (Arm(name="fused", label="fused on", changes={"fused": True}),)
    write_plan(tmp_path, Plan(config=defaults(Workload.USER), arms=arms))
    return tmp_path


def test_a_finished_sweep_stays_finished_where_it_cannot_run(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    sweep = {**read_sweep(folder), "status": "finished", "reason": "as it was"}
    (folder / SWEEP_JSON).write_text(json.dumps(sweep))
    assert main(["--folder", str(folder)]) == FINISHED
    assert read_sweep(folder) == sweep
    assert "as it was" in capsys.readouterr().err


def test_a_sweep_that_cannot_run_is_failed(folder: Path) -> None:
    assert main(["--folder", str(folder)]) == FAILED
    assert read_sweep(folder)["status"] == "failed"
    assert read_sweep(folder)["reason"].startswith("The baseline cannot run here: ")


def test_a_sweep_that_another_process_runs_is_left_alone(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    before = (folder / SWEEP_JSON).read_text()
    with only_one(folder):
        assert main(["--folder", str(folder)]) == USAGE
    assert (folder / SWEEP_JSON).read_text() == before
    assert "another process works on this sweep" in capsys.readouterr().err


def test_a_plan_that_is_none_is_a_sentence(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    plan = json.loads((folder / PLAN_JSON).read_text())
    for wrong in ({"looks": [float("inf")]}, {"looks": 5}, {"max_rounds": 5.5}, {"arms": None}):
        (folder / PLAN_JSON).write_text(json.dumps({**plan, **wrong}))
        assert main(["--folder", str(folder)]) == USAGE
        assert len(capsys.readouterr().err.splitlines()) == 1
