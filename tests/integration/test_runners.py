"""Thread and child process behind their one interface, from start to every kind of end."""

from __future__ import annotations

import importlib
import subprocess
import threading
from dataclasses import replace
from pathlib import Path

import pytest

from stepscope.run import RunStatus, read_run
from tests.support.run_values import run_json
from tests.support.training_runs import small, start_worker
from tests.support.waiting import wait_for, wait_until
from trainer import runners
from trainer.config import Optimizer, RunConfig, Runner, Workload, defaults

BOTH = pytest.mark.parametrize("runner", [Runner.THREAD, Runner.PROCESS])
LONG = 100_000


def config(runner: Runner, epochs: int) -> RunConfig:
    base = replace(defaults(Workload.LINEAR), optimizer=Optimizer.ADAM)
    return replace(base, epochs=epochs, runner=runner)


@BOTH
def test_a_run_goes_from_pending_to_finished(tmp_path: Path, runner: Runner) -> None:
    run = runners.start(config(runner, 2), tmp_path)
    assert read_run(run.folder).status.live
    wait_until(lambda: not run.alive())
    found = read_run(run.folder)
    assert found.status is RunStatus.FINISHED, found.reason
    assert found.run_json["config"]["runner"] == runner


@BOTH
def test_stop_ends_at_a_step_and_keeps_the_data(tmp_path: Path, runner: Runner) -> None:
    run = runners.start(config(runner, LONG), tmp_path)
    wait_until(lambda: read_run(run.folder).run_json.get("step", 0) > 0)
    assert run.stop(10)
    found = read_run(run.folder)
    assert found.status is RunStatus.STOPPED
    assert (run.folder / "last.pt").exists()


@BOTH
def test_a_run_that_cannot_import_torch_says_why(
    tmp_path: Path, runner: Runner, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(_name: str) -> None:
        raise ImportError("libtorch")

    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    (tmp_path / "torch.py").write_text("raise ImportError('libtorch')")
    monkeypatch.setattr(importlib, "import_module", broken)
    run = runners.start(config(runner, 1), tmp_path / "runs")
    wait_until(lambda: not run.alive())
    found = read_run(run.folder)
    assert found.status is RunStatus.FAILED
    assert "libtorch" in str(found.reason)
    assert ("exit code 1" in str(found.reason)) == (runner is Runner.PROCESS)


@BOTH
def test_what_cannot_be_started_is_no_live_run(
    tmp_path: Path, runner: Runner, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise BlockingIOError(11, "Resource temporarily unavailable")

    monkeypatch.setattr(subprocess, "Popen", refuse)
    monkeypatch.setattr(threading.Thread, "start", refuse)
    with pytest.raises(OSError, match="temporarily unavailable"):
        runners.start(config(runner, 1), tmp_path)
    (folder,) = tmp_path.iterdir()
    found = read_run(folder)
    assert found.status is RunStatus.FAILED
    assert "temporarily unavailable" in str(found.reason)


def test_it_stops_when_its_parent_is_gone(tmp_path: Path) -> None:
    config = replace(small(Workload.DIGITS_MLP), epochs=10_000)
    with start_worker(config, tmp_path) as child:
        wait_for(lambda: run_json(tmp_path).get("step", 0) > 5, 60)
        assert child.stdin is not None
        child.stdin.close()
        assert child.wait(20) == 0
    assert run_json(tmp_path)["status"] == "stopped"
