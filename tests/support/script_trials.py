"""Trials of a script: their job, and the processes of a sweep."""

from __future__ import annotations

import shutil
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from stepscope.lab.script_plan import script_command
from stepscope.lab.trial_process import TrialProcess
from tests.support.child_process import processes_with
from tests.support.watched_scripts import ROOT, SCRIPTS


def folder_with(script: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return the current folder, with a script as train.py; sweeps are beside it."""
    folder = tmp_path / "mine"
    folder.mkdir()
    shutil.copy(SCRIPTS / script, folder / "train.py")
    monkeypatch.chdir(folder)
    monkeypatch.setenv("STEPSCOPE_RUNS", str(tmp_path / "runs"))
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    return folder


def take(
    tmp_path: Path,
    *arguments: str,
    steps: int = 40,
    warmup: int = 10,
    ranks: int | None = None,
    links: tuple[str, ...] = (),
    **changes: Any,
) -> dict[str, Any]:
    """Run one trial of train.py in the sweep of this folder and return its answer."""
    sweep = tmp_path / "sweep"
    sweep.mkdir(exist_ok=True)
    script = script_command(
        "train.py", arguments, is_module=False, links=links, nproc_per_node=ranks
    )
    job = {"script": asdict(script), "changes": changes, "seed": 3}
    job |= {"warmup": warmup, "steps": steps}
    return TrialProcess("stepscope.lab.script_trial", sweep).take(job, 200)


def started_in(sweep: Path) -> set[int]:
    """Return the processes of the sweep's trials."""
    return processes_with(f"STEPSCOPE_TRIAL_FOLDER={sweep}")
