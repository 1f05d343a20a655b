"""The plan of a sweep over a script: variants, arguments, and what a resumed sweep accepts."""

from __future__ import annotations

import json
import os
import signal
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from stepscope.cli import lab
from stepscope.lab import command, script_trial
from stepscope.lab.command import FAILED, USAGE, UsageError
from stepscope.lab.folder import METRICS
from stepscope.lab.plan import write_plan
from stepscope.lab.script_plan import (
    ScriptPlan,
    parse_variant,
    script_command,
    words_of,
)
from stepscope.lab.sweep_runner import SweepRunner
from stepscope.watch.trial import TRIAL, begin_trial
from stepscope.watch.watched_run import WatchedRun
from tests.support.fake_sweep import sweep
from tests.support.trial_sessions import TrialSession


def test_the_kinds_of_variants() -> None:
    named = parse_variant("bs64: --batch-size 64 --tag 'a b'")
    assert (named.name, named.changes) == (
        "bs64",
        {"arguments": ["--batch-size", "64", "--tag", "a b"]},
    )
    assert parse_variant("env:OMP_NUM_THREADS=1 env:A=").changes == {
        "env:OMP_NUM_THREADS": "1",
        "env:A": "",
    }
    settings = parse_variant("pin_memory num_workers=4").changes
    assert settings == {"with:pin_memory": True, "with:num_workers": "4"}
    assert words_of(settings) == ["pin_memory", "num_workers=4"]


@pytest.mark.parametrize(
    "text",
    [
        "",
        "bs64:",
        "env:1A=2",
        "env:A=1 env:A=2",
        "tf32=x",
        "rev:main",
    ],
)
def test_a_wrong_variant_is_refused(
    text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)  # no repository
    with pytest.raises(UsageError, match=r"--variant: .*\.$"):
        parse_variant(text)


def test_variants_of_one_option_are_not_combined(script: Path) -> None:
    plan = plan_of(script, "a: --lr 1", "b: --lr 2", "c: --amp", "env:A=1")
    changes = [variant.changes for variant in plan.variants]
    assert plan.combine(changes[0], changes[1])[1] == "--lr is in the combination already"
    negative = [parse_variant(text).changes for text in ("x: --x -1", "y: --y -1")]
    assert plan.combine(*negative) == ({"arguments": ["--x", "-1", "--y", "-1"]}, None)
    together, refused = plan.combine(changes[0], changes[2])
    assert (together, refused) == ({"arguments": ["--lr", "1", "--amp"]}, None)
    assert plan.combine(together, changes[3])[0] == {**together, "env:A": "1"}
    assert plan.combine({"env:A": "2"}, changes[3])[1] is not None


@pytest.fixture
def script(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("STEPSCOPE_RUNS", raising=False)
    path = tmp_path / "train.py"
    path.write_text("print(1)\n")
    return path


def plan_of(script: Path, *variants: str) -> ScriptPlan:
    command = script_command(script.name, ["--lr", "0.1"], is_module=False)
    return ScriptPlan(script=command, variants=tuple(map(parse_variant, variants)))


class Ended:
    """A sweep that fails at once."""

    def run(self) -> dict[str, object]:
        return sweep("failed", reason="ended", variants=[])


def test_only_the_same_command_resumes_a_sweep(
    script: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    began: list[Path] = []
    monkeypatch.setattr(signal, "signal", lambda *_: None)  # those of pytest stay
    monkeypatch.setattr(lab, "SweepRunner", lambda folder, *_: began.append(folder) or Ended())
    folder = tmp_path / "sweep"
    options = ["--folder", str(folder), "--variant", "env:A=1"]
    same = [*options, "train.py", "--lr", "0.1"]
    assert [lab.main(same), lab.main(same)] == [FAILED, FAILED]
    (tmp_path / "other.py").touch()
    for words in (["train.py"], ["other.py", "--lr", "0.1"]):
        assert lab.main([*options, *words]) == USAGE
    script.write_text("print(2)\n")
    assert lab.main(same) == USAGE
    assert began == [folder, folder]


class FakeProcess:
    """Answers as a process would: each change makes the script 1.3 times as fast."""

    stopping = False

    def __init__(self) -> None:
        self.jobs: list[dict[str, Any]] = []

    def take(self, job: dict[str, Any], timeout_s: float) -> dict[str, Any]:
        self.jobs.append(job)
        noise = 1 + 0.002 * ((7 * len(self.jobs)) % 5)
        words = [len(value) // 2 for name, value in job["changes"].items() if name == "arguments"]
        rate = 100 * noise * 1.3 ** sum(words or [bool(job["changes"])])
        metrics = dict.fromkeys(METRICS) | {"samples_per_sec": rate, "step_time": 1 / rate}
        metrics |= {"loss": 0.5, "loss_finite": True}
        return {"seconds": 1.0, "metrics": metrics, "machine": {"rate": "steps/s"}}


def swept(folder: Path, plan: ScriptPlan, process: FakeProcess) -> dict[str, Any]:
    write_plan(folder, plan)
    return SweepRunner(folder, plan, process).run()  # type: ignore[arg-type]


def test_a_trial_whose_steps_are_not_counted_ends(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(TRIAL, json.dumps({"warmup": 1, "steps": 2}))
    monkeypatch.setattr(os, "_exit", sys.exit)
    session = TrialSession(tmp_path)
    for run, code in ((WatchedRun(None), 1), (session.run, 0)):
        with pytest.raises(SystemExit) as ended:
            begin_trial(run, "KeyError: 'torch'")
        assert ended.value.code == code
    assert "KeyError: 'torch'" in str(session.refused)


def test_a_sweep_that_cannot_go_on_ends_with_an_error(
    script: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(signal, "signal", lambda *_: None)
    answer = {"reason": "train.py was edited.", "seconds": 1.0, "stops": True}
    process = SimpleNamespace(stopping=False, take=lambda *_: answer, end=lambda: None)
    monkeypatch.setattr(command, "TrialProcess", lambda _: process)
    words = ["--folder", str(tmp_path / "sweep"), "--variant", "env:A=1", "train.py"]
    assert lab.main(words) == FAILED
    found = json.loads((tmp_path / "sweep/sweep.json").read_text())
    assert (found["status"], found["reason"]) == ("stopped", "train.py was edited.")
    assert "To resume:" in capsys.readouterr().err


@pytest.mark.parametrize(("key", "other"), [("rate", "samples/s"), ("gpu", None)])
def test_a_variant_with_another_unit_or_device_has_failed(
    key: str, other: str | None, script: Path, tmp_path: Path
) -> None:
    class Process(FakeProcess):
        def take(self, job: dict[str, Any], timeout_s: float) -> dict[str, Any]:
            values = {"rate": "steps/s", "gpu": "A100"}
            values |= {key: other} if "env:A" in job["changes"] else {}
            return super().take(job, timeout_s) | {"machine": values}

    found = swept(tmp_path / "sweep", plan_of(script, "env:A=", "b: --lr 1"), Process())
    assert [variant["verdict"] for variant in found["variants"]] == ["failed", "faster"]
    assert found["variants"][0]["reason"].startswith(f"{key}: the sweep was measured with ")


def test_no_trial_may_change_files_beside_recorded_runs_and_sweeps(
    script: Path, tmp_path: Path
) -> None:
    """./runs is also the folder of TensorBoard; the script may be beside the current folder."""
    for name in (
        *("run/run.json", "run/new", "lab/a/new", "tensorboard/new", "sweep/new"),
        *(".git/index", "__pycache__/a.pyc"),
    ):
        path = tmp_path / "runs" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("{}")
    found = script_trial._files(plan_of(script).script, tmp_path / "runs/sweep")
    names = {os.path.relpath(path, tmp_path) for path, *_ in found}
    assert names == {"train.py", "runs/tensorboard/new"}
    beside = replace(plan_of(script).script, cwd=str(tmp_path / "b"), target="../a/train.py")
    assert beside.folders == (tmp_path / "b", tmp_path / "a")
