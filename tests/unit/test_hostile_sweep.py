"""A damaged or made-up sweep.json, and the lock of a sweep."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import pytest

from dashboard.sweep_content import SweepStatus, to_content
from dashboard.sweeps import Sweeps
from dashboard.views.lab_panel import label, progress_words
from stepscope.lab.folder import (
    LOCK,
    PLAN_JSON,
    SWEEP_JSON,
    SweepError,
    only_one,
)
from stepscope.run import process_identity
from tests.support.fake_sweep import sweep

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


def test_texts_are_printable_and_limited() -> None:
    text = str(to_content(sweep(throttled="\x1b[2J" + "A" * 2000)).throttled)
    assert text.isprintable()
    assert len(text) <= 400


@pytest.mark.parametrize(
    "bad",
    [
        {"updated": HUGE},
        {"created": HUGE},
        {"created": -1e300},
        {"created": 1e300},
        {"status": "running", **process_identity(), "pid": float("inf")},
        {"status": "running", **process_identity(), "pid": HUGE},
        {"status": "running", "host": "elsewhere", "updated": HUGE},
        {"status": "running", "host": "elsewhere", "progress": {"done": HUGE, "total": 1}},
    ],
)
def test_numbers_beyond_all_bounds_do_not_end_the_page(tmp_path: Path, bad: dict[str, Any]) -> None:
    made = sweeps(tmp_path, **bad)
    found = made.list_sweeps()
    assert GOOD in [one.id for one in found]
    for one in found:
        assert label(one)
        assert progress_words(one.content)
        assert one.content.share <= 1
    assert made.active_id() is None or bad["status"] == "running"


def test_only_a_recently_planned_sweep_is_active(tmp_path: Path) -> None:
    made = sweeps(tmp_path, status="pending", created=9e9)
    assert made.active_id() is None
    assert made.read(BAD).content.status is SweepStatus.STOPPED
    recent = sweep(status="pending", created=time.time())
    (tmp_path / "lab" / BAD / SWEEP_JSON).write_text(json.dumps(recent))
    assert Sweeps(tmp_path, tmp_path / "examples").active_id() == BAD


def test_a_sweep_of_another_host_is_live_but_not_active_here(tmp_path: Path) -> None:
    made = sweeps(tmp_path, status="running", host="elsewhere", updated=time.time())
    assert made.read(BAD).live
    assert made.active_id() is None


def test_null_in_place_of_a_number_is_a_missing_value() -> None:
    content = sweep(updated=None)
    content["progress"]["done"] = None
    content["variants"][0] |= {"rounds": None, "metrics": None, "loss": None}
    content["plan"]["config"]["max_steps"] = None
    found = to_content(content)
    assert (found.updated, found.progress.done) == (0.0, 0)
    assert (found.variants[0].rounds, found.variants[0].metrics) == (0, {})
    assert found.plan.config["max_steps"] is None  # a setting may be null


def test_a_lock_or_folder_that_is_a_link_is_not_followed(tmp_path: Path) -> None:
    (tmp_path / "precious").write_text("kept")
    (tmp_path / "sweep").mkdir()
    (tmp_path / "sweep" / LOCK).symlink_to(tmp_path / "precious")
    with pytest.raises(OSError, match="symbolic links"), only_one(tmp_path / "sweep"):
        pass
    folder = written(tmp_path / "other", GOOD, json.dumps(sweep()))
    (tmp_path / "lab").mkdir()
    (tmp_path / "lab" / GOOD).symlink_to(folder)
    with pytest.raises(SweepError):
        Sweeps(tmp_path, tmp_path / "examples").delete(GOOD)
    assert (folder / SWEEP_JSON).is_file()
    assert (tmp_path / "precious").read_text() == "kept"


@pytest.mark.parametrize("status", ["failed", "stopped", "finished"])
def test_a_sweep_whose_lock_is_held_is_not_deleted(tmp_path: Path, status: str) -> None:
    folder = written(tmp_path, GOOD, json.dumps(sweep(status)))
    made = Sweeps(tmp_path, tmp_path / "examples")
    with only_one(folder), pytest.raises(SweepError, match="another process is running this"):
        made.delete(GOOD)
    assert (folder / SWEEP_JSON).is_file()
    made.delete(GOOD)
    assert not folder.exists()
