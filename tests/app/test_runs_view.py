"""The Runs page: the values of a row, and that a run can be opened."""

from __future__ import annotations

from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest

from dashboard import services
from dashboard.run_summary import RunSummary, summarize
from dashboard.views.run_rows import disk_use, row
from stepscope.common.formatting import format_bytes
from stepscope.recorder.recorder import Recorder
from stepscope.run import RunStatus, read_run
from tests.support.app_page import OpenPage, component, record, text_of
from trainer.config import RunConfig

GIB = 2**30


def recorded(folder: Path, **run_info: Any) -> Recorder:
    """A run of 3,000 steps: more than one frame, so that its numbers come from rollups."""
    folder.mkdir()
    recorder = Recorder(folder, name="digits_cnn", config=RunConfig().to_dict())
    recorder.describe(**run_info)
    for step in range(1, 3001):
        seconds = 0.1 + 0.2 * (step % 2)  # of 100 samples
        rate = {"perf/samples_per_sec": 100 / seconds, "perf/step_time": seconds}
        recorder.log(step, {"train/loss": 5.0 - step / 1000, **rate})
    recorder.sample({"memory/peak_allocated": 2.0 * GIB, "process/rss": 1.0 * GIB})
    recorder.sample({"memory/peak_allocated": 1.0 * GIB, "process/rss": 3.0 * GIB})
    return recorder


def test_a_row_has_the_runs_best_loss_rate_and_peaks(tmp_path: Path) -> None:
    gpu = {"uuid": "GPU-1", "name": "NVIDIA H100", "memory_total": 80 * GIB}
    recorder = recorded(tmp_path / "job", device="GPU-1", devices=[gpu], rank=0, world_size=4)
    recorder.close(RunStatus.FINISHED)
    run = read_run(tmp_path / "job")
    cells = row(run, summarize(run))
    assert cells["Best loss"] == pytest.approx(2.0)
    assert cells["Samples/s"] == pytest.approx(4 * 500, rel=1e-3), "200 samples in 0.4 s a rank"
    assert (cells["Peak allocated"], cells["Peak process"]) == (2.0, 3.0)
    assert (cells["Device"], cells["Precision"], cells["Steps"]) == ("NVIDIA H100", "fp32", 3000)
    assert cells["Duration"] <= timedelta(seconds=60)


def test_a_run_without_a_store_or_with_a_damaged_one_has_no_numbers(tmp_path: Path) -> None:
    store = record(tmp_path, "one") / "rank0.sqlite"
    store.write_bytes(b"x" * 5000)
    others = sum(path.stat().st_size for path in store.parent.iterdir() if path != store)
    assert summarize(read_run(store.parent)) == RunSummary(size=others + 5000)
    store.unlink()
    assert summarize(read_run(store.parent)) == RunSummary(size=others)
    link = tmp_path / "link"
    link.symlink_to(store.parent)
    assert summarize(read_run(link)) == RunSummary(size=link.lstat().st_size)


def test_the_disk_use_of_a_folder_that_disappears_is_empty(tmp_path: Path) -> None:
    assert "2 listed runs use 3.00 KiB;" in disk_use(tmp_path, [1024, 2048])
    assert disk_use(tmp_path / "absent", [1000]) == ""


def test_the_summary_of_a_live_run_follows_it(server: services.Services) -> None:
    recorder = recorded(server.runs / "one")
    recorder.set_status(RunStatus.RUNNING)
    server.summary(read_run(recorder.folder))
    for step, loss in ((3001, 0.25), (3002, 9.0)):  # the best validation loss counts
        recorder.log(step, {"val/loss": loss})
    recorder.close(RunStatus.FINISHED)
    ended = read_run(recorder.folder)
    assert server.summary(ended).best_loss == 0.25
    (recorder.folder / "rank0.sqlite").unlink()  # an ended run is not read again
    assert server.summary(ended).best_loss == 0.25


def test_the_page_lists_the_runs_and_the_run_page_shows_the_opened_one(
    page: OpenPage, server: services.Services
) -> None:
    app = page()
    app.switch_page("views/runs.py").run()
    assert not app.exception
    assert "No runs yet" in text_of(app)
    assert str(server.runs.absolute()) in text_of(app)
    assert not app.dataframe
    record(server.runs, "one")
    app.run()
    table = app.dataframe[0].value
    assert (list(table["Name"]), list(table["Status"])) == (["digits_cnn"], ["finished"])
    size = sum(path.stat().st_size for path in (server.runs / "one").iterdir())
    assert list(table["Size"]) == [size / 2**20]
    assert f"use {format_bytes(size)}; " in text_of(app).replace("uses", "use")
    app.session_state["run"] = "one"
    app.switch_page("views/run.py").run()
    assert component(app)["run"] == "one"
