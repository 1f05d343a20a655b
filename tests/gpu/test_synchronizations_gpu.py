"""A watched CUDA script waits for the device exactly as often as the bare one.

Counted by the simulator, call by call: on a GPU nobody counts.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from stepscope.run import run_folders
from stepscope.watch.hooks.state import TRIAL_BACKWARDS
from tests.gpu.conftest import simulator_only
from tests.support.child_process import run_python
from tests.support.run_values import metric

SCRIPT = Path(__file__).resolve().parents[1] / "scripts" / "synchronizing.py"


def counted(tmp_path: Path, way: str, *how: str) -> list[dict[str, Any]]:
    """What the script says when it is run bare or under watch."""
    done = run_python(*how, str(SCRIPT), way, timeout_s=300, STEPSCOPE_RUNS=str(tmp_path))
    assert done.returncode == 0, done.stderr
    assert "will be missing" not in done.stderr
    return [json.loads(line) for line in done.stdout.splitlines()]


@simulator_only
@pytest.mark.parametrize("way", ["plain", "mixed precision", "two optimizers", "by hand"])
def test_a_watched_script_waits_as_often_as_the_bare_one(tmp_path: Path, way: str) -> None:
    bare, bare_losses = counted(tmp_path, way)
    watched, losses = counted(tmp_path, way, "-m", "stepscope.watch")
    assert bare["synchronizations"] > 0, "the script reads a loss each epoch"
    assert watched == bare
    assert losses == bare_losses
    [folder] = run_folders(tmp_path)
    recorded = metric(folder, "train/loss")
    if way == "by hand":
        assert len(recorded) == len(losses["losses"]) - TRIAL_BACKWARDS
    else:
        assert len(recorded) == len(losses["losses"])
        assert len(metric(folder, "train/grad_norm")) == len(recorded)
