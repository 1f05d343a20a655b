"""Runs of a workload of the user's own: here, in workers and in a child process."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.support.run_values import run_json
from tests.support.training_runs import refused, train
from tests.support.waiting import wait_until
from trainer.config import RunConfig, Runner, Workload, defaults
from trainer.runners import start
from trainer.workloads.custom_file import VARIABLE, choose

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


@pytest.mark.parametrize("workers", [0, 2])
def test_the_example_runs_with_and_without_workers(tmp_path: Path, workers: int) -> None:
    choose(f"{EXAMPLE}:build")
    config = own(num_workers=workers, max_steps=20)
    train(tmp_path, "run", config)
    run = run_json(tmp_path / "run")
    assert run["step"] == 20
    assert run["user_workload"] == "own_workload.py:build"


def test_a_child_process_knows_it_too(tmp_path: Path) -> None:
    choose(f"{EXAMPLE}:build")
    active = start(own(runner=Runner.PROCESS, max_steps=5), tmp_path)
    wait_until(lambda: not active.alive(), 60)
    run = run_json(active.folder)
    assert (run["status"], run["step"]) == ("finished", 5), run["reason"]


@pytest.mark.parametrize("workers", [0, 1])
def test_a_sample_that_cannot_be_made_is_told_with_its_line(tmp_path: Path, workers: int) -> None:
    before = "        return torch.tensor("
    raising = "        if index > 1000:\n            raise OSError('gone')\n"
    text = EXAMPLE.read_text().replace(before, raising + before)
    path = tmp_path / "broken.py"
    path.write_text(text)
    line = text.splitlines().index("            raise OSError('gone')") + 1
    choose(f"{path}:build")
    assert refused(tmp_path, "run", own(num_workers=workers)) == (
        f"broken.py, line {line}, in __getitem__: OSError: gone. Correct the file and start again."
    )
