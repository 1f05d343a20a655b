"""Trials of a script: their job, and the processes of a sweep."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import Any

import pytest

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


def vars_of(script: Any) -> dict[str, Any]:
    return {name: getattr(script, name) for name in script.__dataclass_fields__}


def started_in(sweep: Path) -> list[int]:
    """Return the processes of the sweep's trials."""
    found = []
    for process in Path("/proc").glob("[0-9]*/environ"):
        try:
            if f"STEPSCOPE_TRIAL_FOLDER={sweep}".encode() in process.read_bytes():
                found.append(int(process.parent.name))
        except OSError:
            continue
    return [pid for pid in found if pid != os.getpid()]
