"""`stepscope.open` returns a run's values in numpy, live, ended or killed."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

import stepscope
from stepscope import RunError
from stepscope.run import RunStatus
from stepscope.store import StoreError
from stepscope.store import reader as store_rows
from stepscope.store.recorder import Recorder
from stepscope.store.writer import recover
from tests.support.run_folders import killed_run, make_run
from tests.support.waiting import wait_until


@pytest.fixture
def recorder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Recorder]:
    """A live run below STEPSCOPE_RUNS."""
    monkeypatch.setenv("STEPSCOPE_RUNS", str(tmp_path))
    (tmp_path / "first").mkdir()
    recorder = Recorder(tmp_path / "first", name="first", config={"lr": 0.1})
    recorder.set_status(RunStatus.RUNNING)
    yield recorder
    recorder.close(RunStatus.FINISHED)


def test_values_of_an_ended_run_and_gaps(recorder: Recorder) -> None:
    recorder.log(1, {"train/loss": 2.0, "train/lr": 0.1})
    recorder.log(2, {"train/lr": 0.2})
    recorder.log(3, {"train/loss": math.inf})
    recorder.event("mark", "here", value=1)
    recorder.close(RunStatus.FINISHED)
    run = stepscope.open("first")
    assert (run.id, run.status, run.config) == ("first", "finished", {"lr": 0.1})
    assert run.metrics == ("train/loss", "train/lr")
    times, steps, loss = run.series("train/loss")
    assert steps.tolist() == [1, 2, 3]
    np.testing.assert_array_equal(loss, [2.0, np.nan, math.inf])
    assert 0 <= time.time() - times[0] < 60
    np.testing.assert_array_equal(run.series("train/lr").value, [0.1, 0.2, np.nan])
    assert [(event.text, event.data) for event in run.events() if event.kind == "mark"] == [
        ("here", {"value": 1})
    ]


def test_a_live_run_can_be_read_again_and_again(recorder: Recorder) -> None:
    run = stepscope.open(recorder.folder)
    assert (run.status.live, run.metrics, run.gpus) == (True, (), ())
    with pytest.raises(RunError, match="no metric yet"):
        run.series("train/loss")
    for expected in (1, 2):
        recorder.log(expected, {"train/loss": 0.0})
        wait_until(lambda: "train/loss" in run.metrics)
        wait_until(lambda count=expected: len(run.series("train/loss").step) == count)


def test_a_long_run_is_read_in_slices(recorder: Recorder, monkeypatch: pytest.MonkeyPatch) -> None:
    for step in range(1, 2001):
        recorder.log(step, {"train/loss": step / 2})
    recorder.close(RunStatus.FINISHED)
    monkeypatch.setattr(store_rows, "SLICE_ROWS", 512)
    _, steps, loss = stepscope.open("first").series("train/loss")
    assert steps.tolist() == list(range(1, 2001))
    np.testing.assert_array_equal(loss, steps / 2)


def test_one_gpu_is_the_default_and_one_of_several_must_be_named(recorder: Recorder) -> None:
    recorder.sample({"gpu/util": 40.0}, "GPU-a")
    run = stepscope.open("first")
    wait_until(lambda: "gpu/util" in run.metrics)
    assert run.series("gpu/util").value.tolist() == [40.0]
    recorder.sample({"gpu/util": 60.0}, "GPU-b")
    recorder.close(RunStatus.FINISHED)
    assert run.gpus == ("GPU-a", "GPU-b")
    assert run.series("gpu/util", gpu="GPU-b").value.tolist() == [60.0]
    for gpu in (None, "GPU-c"):
        with pytest.raises(RunError, match=f"GPU-a, GPU-b, got {gpu}. Name one"):
            run.series("gpu/util", gpu=gpu)


def test_an_unknown_metric_is_answered_with_those_of_the_run(recorder: Recorder) -> None:
    recorder.log(1, {"train/loss": 2.0, "val/loss": 2.0, "perf/fps": 1.0})
    recorder.close(RunStatus.FINISHED)
    with pytest.raises(RunError, match="no 'loss'. It has train/loss, val/loss, perf/fps."):
        stepscope.open("first").series("loss")


def test_an_unknown_run_or_store_is_an_error(tmp_path: Path, recorder: Recorder) -> None:
    for name, problem in (
        ("second", "no run 'second' in"),
        ("../first", "must be the name of a run folder"),
    ):
        with pytest.raises(RunError, match=problem):
            stepscope.open(name)
    with pytest.raises(RunError, match="no folder .*elsewhere"):
        stepscope.open("first", runs=tmp_path / "elsewhere")
    empty = make_run(tmp_path, "empty")
    with pytest.raises(StoreError, match="recorded nothing"):
        stepscope.open(empty).series("train/loss")
    with pytest.raises(StoreError, match=r"rank1.sqlite: missing"):
        stepscope.open("first", rank=1).events()


def test_the_ranks_of_a_job_are_listed(recorder: Recorder) -> None:
    folder = recorder.folder
    for number in (10, 2):
        Recorder(folder, name="first", rank=number).close(RunStatus.FINISHED)
    (folder / "rank-3.sqlite").touch()
    (folder / "rank07.sqlite").touch()
    assert stepscope.open("first").ranks == (0, 2, 10)


def test_the_last_steps_of_a_killed_run_are_read_and_not_moved(tmp_path: Path) -> None:
    def files() -> dict[str, bytes]:  # without the index that SQLite rebuilds for a reader
        paths = (path for path in tmp_path.iterdir() if not path.name.endswith("-shm"))
        return {path.name: path.read_bytes() for path in paths}

    last = killed_run(tmp_path)
    before, run = files(), stepscope.open(tmp_path)
    found = run.series("train/loss")
    assert run.status is RunStatus.CRASHED
    assert found.step[-1] >= last
    np.testing.assert_array_equal(found.step, np.arange(1, len(found.step) + 1))
    np.testing.assert_array_equal(found.value, found.step / 2)
    assert files() == before
    assert recover(tmp_path) > 0
    assert not (tmp_path / "rank0.ring").exists()
    for one, other in zip(found, run.series("train/loss"), strict=True):
        np.testing.assert_array_equal(one, other)
