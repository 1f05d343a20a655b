"""A damaged or made-up sweep.json in the list: the page goes on with the others."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path
from typing import Any

import pytest

from dashboard.controls.sweep_picker import label
from dashboard.sweep_content import SweepStatus
from dashboard.sweeps import Sweeps
from dashboard.views.lab_panel import progress_words
from stepscope.run import process_identity, process_of
from tests.support.fake_sweep import arm, sweep
from trainer.lab.folder import (
    LOCK,
    PLAN_JSON,
    SWEEP_JSON,
    SweepError,
    only_one,
    read_sweep,
    seconds_per_sample,
)
from trainer.lab.report import to_html

HUGE = 10**400
GOOD, BAD = "20261122-061500-digits-mlp-ab12", "20261122-061501-digits-mlp-ab13"


def written(runs: Path, name: str, text: str) -> Path:
    folder = runs / "lab" / name
    folder.mkdir(parents=True)
    (folder / PLAN_JSON).write_text("{}")
    (folder / SWEEP_JSON).write_text(text)
    return folder


def sweeps(runs: Path, **bad: Any) -> Sweeps:
    """A good sweep and one with these entries."""
    written(runs, GOOD, json.dumps(sweep()))
    written(runs, BAD, json.dumps(sweep(**bad)))
    return Sweeps(runs, runs / "examples")


@pytest.mark.parametrize(
    "bad",
    [
        {"updated": HUGE},
        {"created": HUGE},
        {"created": 1e300},
        {"created": -1e300},
        {"status": "running", **process_identity(), "pid": float("inf")},
        {"status": "running", **process_identity(), "pid": HUGE},
        {"status": "running", "host": "elsewhere", "updated": HUGE},
        {"status": "running", "host": "elsewhere", "progress": {"done": HUGE, "total": 1}},
        {"rounds": [{"round": HUGE, "samples": {"baseline": {"seconds": HUGE}}}]},
    ],
)
def test_numbers_beyond_all_bounds_do_not_end_the_page(tmp_path: Path, bad: dict[str, Any]) -> None:
    made = sweeps(tmp_path, **bad)
    found = made.list_sweeps()
    assert GOOD in [one.id for one in found]
    for one in found:
        assert label(one)
        assert progress_words(one.content)
        assert one.content.progress.share <= 1
    assert made.active_id() is None or bad["status"] == "running"
    seconds_per_sample(tmp_path, "digits_mlp", "cpu")


def test_brackets_without_end_are_no_json(tmp_path: Path) -> None:
    folder = written(tmp_path, BAD, "[" * 200_000)
    with pytest.raises(SweepError, match="is no JSON"):
        read_sweep(folder)
    assert Sweeps(tmp_path, tmp_path / "examples").list_sweeps() == []


def test_a_sweep_planned_in_the_future_is_not_waited_for(tmp_path: Path) -> None:
    made = sweeps(tmp_path, status="pending", created=9e9)
    assert made.active_id() is None
    assert made.read(BAD).content.status is SweepStatus.STOPPED


def test_a_sweep_that_was_just_planned_is_waited_for(tmp_path: Path) -> None:
    made = sweeps(tmp_path, status="pending", created=time.time())
    assert made.active_id() == BAD


def test_a_process_number_that_is_none_is_no_process() -> None:
    for pid in (float("inf"), HUGE, "x", None):
        assert process_of({**process_identity(), "pid": pid}) is None
    assert process_of(process_identity() | {"pid_started": HUGE}) is None
    found = process_of(process_identity())
    assert found is not None
    assert found.pid == os.getpid()


def test_a_report_says_where_the_time_is_not_known() -> None:
    for created in (HUGE, 1e300, float("nan"), None):
        told = sweep(created=created, arms=[arm("compile", "faster", 0.31)], combining=[])
        assert "Begun at an unknown time on" in to_html(told)


def test_a_lock_that_is_a_link_is_not_followed(tmp_path: Path) -> None:
    (tmp_path / "precious").write_text("kept")
    (tmp_path / "sweep").mkdir()
    (tmp_path / "sweep" / LOCK).symlink_to(tmp_path / "precious")
    with pytest.raises(OSError, match="symbolic links"), only_one(tmp_path / "sweep"):
        pass
    assert (tmp_path / "precious").read_text() == "kept"
