"""`stepscope.open` shows the steps that a killed process left in its ring, and moves nothing."""

from __future__ import annotations

from pathlib import Path

import numpy as np

import stepscope
from stepscope.recorder.recovery import recover
from stepscope.recorder.ring import abandoned
from stepscope.run import RunError, RunStatus
from tests.support.killed_runs import killed_run


def contents(folder: Path) -> dict[str, bytes]:
    """Every file but the index that SQLite rebuilds for a reader."""
    return {
        path.name: path.read_bytes() for path in folder.iterdir() if not path.name.endswith("-shm")
    }


def stored_steps(run: stepscope.Run) -> int:
    """Count the steps that are shown; a run killed in its first half second has stored none."""
    try:
        return len(run.series("train/loss").step)
    except RunError:
        return 0


def test_the_last_steps_of_a_killed_run_are_there(tmp_path: Path) -> None:
    told = killed_run(tmp_path)
    before = contents(tmp_path)
    run = stepscope.open(tmp_path)
    found = run.series("train/loss")
    assert run.status is RunStatus.CRASHED
    assert found.step[-1] >= told
    np.testing.assert_array_equal(found.step, np.arange(1, len(found.step) + 1))
    np.testing.assert_array_equal(found.value, found.step / 2)
    assert contents(tmp_path) == before
    with abandoned(tmp_path / "rank0.ring"):  # being moved by another reader at this moment
        assert stored_steps(run) < len(found.step)
    assert recover(tmp_path) > 0
    again = run.series("train/loss")
    for one, other in zip(found, again, strict=True):
        np.testing.assert_array_equal(one, other)
