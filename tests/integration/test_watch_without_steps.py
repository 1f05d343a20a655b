"""Scripts without an optimizer are recorded where that can be, and else say why they are not."""

from __future__ import annotations

from pathlib import Path

import pytest

from stepscope.run import RunStatus, read_run, run_folders
from tests.support.run_values import metric
from tests.support.watched_scripts import AS_MODULE, run, watched_like_bare


def test_updates_by_hand_are_steps(tmp_path: Path) -> None:
    found = watched_like_bare(tmp_path, "without_optimizer.py", "by_hand")
    [folder] = run_folders(tmp_path)
    losses = [line for line in (folder / "output.log").read_text().splitlines() if line]
    assert [loss.hex() for loss in metric(folder, "train/loss").tolist()] == losses
    assert found.run_json["step"] == len(losses)
    assert found.reason is None


@pytest.mark.parametrize(
    ("way", "why"),
    [
        ("functions", "never called backward()"),
        ("never_stepped", "never stepped one"),
        ("children", "Training in the processes that it started is not recorded"),
    ],
)
def test_what_could_not_be_captured_is_said(tmp_path: Path, way: str, why: str) -> None:
    found = watched_like_bare(tmp_path, "without_optimizer.py", way, last_line=why)
    assert found.status is RunStatus.FINISHED
    assert why in str(found.reason)


def test_a_forked_child_says_nothing_at_its_end(tmp_path: Path) -> None:
    seen = run([*AS_MODULE, "without_optimizer.py", "forked"], tmp_path)
    [folder] = run_folders(tmp_path)
    found = read_run(folder)
    assert (found.status, found.run_json["step"], found.reason) == (RunStatus.FINISHED, 1, None)
    assert [line[:25] for line in seen.stderr.splitlines()] == [b"stepscope: recording into"]
