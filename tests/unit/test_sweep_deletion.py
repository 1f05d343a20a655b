"""A sweep is deleted only where no process works on it, whatever its sweep.json says."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from dashboard.sweeps import Sweeps
from tests.support.fake_sweep import sweep
from trainer.lab.folder import PLAN_JSON, SWEEP_JSON, SweepError, only_one

ID = "20261122-061500-digits-mlp-ab12"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    made = tmp_path / "lab" / ID
    made.mkdir(parents=True)
    (made / PLAN_JSON).write_text("{}")
    return made


@pytest.mark.parametrize("status", ["failed", "stopped", "finished"])
def test_a_sweep_whose_lock_is_held_stays(tmp_path: Path, folder: Path, status: str) -> None:
    (folder / SWEEP_JSON).write_text(json.dumps(sweep(status)))
    sweeps = Sweeps(tmp_path, tmp_path / "examples")
    with (
        only_one(folder),
        pytest.raises(SweepError, match=r"another process is running this sweep\."),
    ):
        sweeps.delete(ID)
    assert (folder / SWEEP_JSON).is_file()
    sweeps.delete(ID)
    assert not folder.exists()
