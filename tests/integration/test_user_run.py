"""Runs of a workload of the user's own: here, in workers and in a child process."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from stepscope.run import RunStatus
from trainer.config import RunConfig, Runner, Workload, defaults
from trainer.custom_workload import VARIABLE, choose
from trainer.runners import start
from trainer.training.train import run as train

EXAMPLE = Path(__file__).resolve().parents[2] / "examples" / "own_workload.py"


@pytest.fixture(autouse=True)
def environment(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv(VARIABLE, "")
    monkeypatch.setattr(sys, "path", list(sys.path))
    yield
    for name in [name for name in sys.modules if name.startswith("user_workload_")]:
        del sys.modules[name]


def own(**changes: Any) -> RunConfig:
    return replace(defaults(Workload.CUSTOM), num_threads=1, **({"epochs": 2} | changes))


def run_json(folder: Path) -> dict[str, Any]:
    loaded: dict[str, Any] = json.loads((folder / "run.json").read_text())
    return loaded


@pytest.mark.parametrize("workers", [0, 2])
def test_the_example_runs_with_and_without_workers(tmp_path: Path, workers: int) -> None:
    choose(f"{EXAMPLE}:build")
    config = own(num_workers=workers, custom_options="wide,slow_loading", max_steps=20)
    assert train(config, tmp_path) is RunStatus.FINISHED, run_json(tmp_path)["reason"]
    run = run_json(tmp_path)
    assert run["step"] == 20
    assert run["user_workload"] == "own_workload.py:build"
    assert run["config"]["custom_options"] == "wide,slow_loading"


def test_a_child_process_knows_it_too(tmp_path: Path) -> None:
    choose(f"{EXAMPLE}:build")
    active = start(own(runner=Runner.PROCESS, max_steps=5), tmp_path)
    deadline = time.monotonic() + 60
    while active.alive() and time.monotonic() < deadline:
        time.sleep(0.05)
    run = run_json(active.folder)
    assert (run["status"], run["step"]) == ("finished", 5), run["reason"]


@pytest.mark.parametrize("workers", [0, 1])
def test_a_sample_that_cannot_be_made_is_told_with_its_line(tmp_path: Path, workers: int) -> None:
    before = "        if self.pause_s:\n"
    raising = "        if index > 1000:\n            raise OSError('gone')\n"
    text = EXAMPLE.read_text().replace(before, raising + before)
    path = tmp_path / "broken.py"
    path.write_text(text)
    line = text.splitlines().index("            raise OSError('gone')") + 1
    choose(f"{path}:build")
    folder = tmp_path / "run"
    folder.mkdir()
    assert train(own(num_workers=workers), folder) is RunStatus.FAILED
    assert run_json(folder)["reason"] == (
        f"broken.py, line {line}, in __getitem__: OSError: gone. Correct the file and start again."
    )
