"""`python -m trainer.lab` on the folder of a sweep."""

from __future__ import annotations

import json
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from stepscope.cli import lab, tune
from stepscope.lab.command import STOPPED, USAGE
from stepscope.lab.folder import PLAN_JSON, read_sweep
from stepscope.lab.plan import Variant, write_plan
from tests.support.train_devices import SIMULATED
from trainer.config import Workload, defaults
from trainer.lab.__main__ import main
from trainer.lab.plan import WorkloadPlan
from trainer.training.config_validation import TrainDevice


@pytest.fixture(autouse=True)
def handlers() -> Iterator[None]:
    """Put back the handlers of signals, which the command replaces."""
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Return the folder of a sweep that has not begun."""
    variants = (Variant(name="fused", label="fused on", changes={"optimizer_impl": "fused"}),)
    write_plan(tmp_path, WorkloadPlan(config=defaults(Workload.LINEAR), variants=variants))
    return tmp_path


def test_a_baseline_that_cannot_run_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A simulated GPU, whose speed is not measured."""
    monkeypatch.setattr("trainer.training.devices.list_devices", lambda: [SIMULATED])
    config = defaults(Workload.LINEAR, SIMULATED.id)
    write_plan(tmp_path, WorkloadPlan(config=config, variants=()))
    assert main(["--folder", str(tmp_path)]) == USAGE
    assert "simulated" in capsys.readouterr().err
    assert read_sweep(tmp_path)["status"] == "pending"


def test_an_invalid_plan_is_a_sentence(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    plan = json.loads((folder / PLAN_JSON).read_text())
    for wrong in ({"looks": [float("inf")]}, {"looks": 5}, {"max_rounds": 5.5}, {"variants": None}):
        (folder / PLAN_JSON).write_text(json.dumps({**plan, **wrong}))
        assert main(["--folder", str(folder)]) == USAGE
        assert len(capsys.readouterr().err.splitlines()) == 1


def test_a_folder_of_other_files_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A trial would delete and truncate files in it."""
    (mine := tmp_path / "mine").mkdir()
    (mine / "trials.jsonl").write_text("a line without its end")
    (script := tmp_path / "train.py").touch()
    at = ["--folder", str(mine)]
    assert main([*at, "--workload", "linear", "--device", "cpu"]) == USAGE
    assert lab.main([*at, "--variant", "tf32", str(script)]) == USAGE
    assert tune.main([*at, str(script)]) == USAGE
    assert capsys.readouterr().err.count("not empty") == 3
    assert [(one.name, one.read_text()) for one in mine.iterdir()] == [
        ("trials.jsonl", "a line without its end")
    ]


def test_ctrl_c_during_imports_stops_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted() -> list[TrainDevice]:
        signal.raise_signal(signal.SIGINT)
        return [TrainDevice(id="cpu", name="a CPU", memory_total=2**33)]

    monkeypatch.setattr("trainer.training.devices.list_devices", interrupted)
    variants = (Variant(name="set_to_none=false", label="off", changes={"set_to_none": False}),)
    write_plan(
        tmp_path, WorkloadPlan(config=defaults(Workload.LINEAR), variants=variants, steps=30)
    )
    assert main(["--folder", str(tmp_path)]) == STOPPED
    assert read_sweep(tmp_path)["status"] == "stopped"
    assert read_sweep(tmp_path)["progress"]["done"] == 0
