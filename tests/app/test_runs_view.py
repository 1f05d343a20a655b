"""The Runs page: the values of a row, and that a run can be opened."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from streamlit.testing.v1 import AppTest

from dashboard.charts.layout import layout
from dashboard.charts.run_view import run_content
from dashboard.format import escape_markdown
from dashboard.run_rows import cells_of, whole_metadata
from dashboard.services import Services
from stepscope.run import RunStatus, read_metadata, read_run
from stepscope.run.info import FinalMetric, edit_notes
from stepscope.store.recorder import Recorder
from tests.support.app_page import (
    OpenPage,
    at_address,
    component,
    header,
    label,
    record,
)
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


@pytest.mark.parametrize("validation", [(), (0.25, 9.0)])
def test_a_row_has_the_runs_best_loss_rate_and_peaks(
    tmp_path: Path, validation: tuple[float, ...]
) -> None:
    gpu = {"uuid": "GPU-1", "name": "NVIDIA H100", "memory_total": 80 * GIB}
    recorder = recorded(tmp_path / "job", device="GPU-1", devices=[gpu], rank=0, world_size=4)
    for step, loss in enumerate(validation, start=3001):  # counts if there is one
        recorder.log(step, {"val/loss": loss})
    recorder.close(RunStatus.FINISHED)
    run = read_run(tmp_path / "job")
    cells = cells_of(run, None)
    assert cells["Best loss"] == pytest.approx(validation[0] if validation else 2.0)
    assert cells["Samples/s"] == pytest.approx(4 * 500, rel=1e-3), "200 samples in 0.4 s a rank"
    assert (cells["Peak allocated"], cells["Peak process"]) == (2.0, 3.0)
    (tile,) = [tile for tile in layout(run_content(run))["kpis"] if tile["id"] == "samples_per_sec"]
    # The tile of the ended run had the mean of the rates, 667 a rank.
    assert tile["whole"] * tile["scale"] == pytest.approx(cells["Samples/s"])


def test_the_numbers_are_in_run_json_or_the_store_or_there_are_none(tmp_path: Path) -> None:
    folder = record(tmp_path, "one")
    run_json = json.loads((folder / "run.json").read_text())
    whole = whole_metadata(read_run(folder))
    assert whole.final == {"train/loss": FinalMetric(1.0, 1.0)}
    del run_json["final"], run_json["totals"]  # as while it ran
    (folder / "run.json").write_text(json.dumps(run_json))
    assert whole_metadata(read_run(folder)) == whole
    (folder / "rank0.sqlite").write_bytes(b"x" * 5000)
    assert cells_of(read_run(folder), None)["Best loss"] is None


def test_the_page_lists_the_runs_and_the_run_page_shows_the_opened_one(
    page: OpenPage, server: Services
) -> None:
    app = page()
    app.switch_page("views/runs.py").run()
    assert not app.dataframe
    record(server.runs, "one")
    app.run()
    table = app.dataframe[0].value
    assert (list(table["Name"]), list(table["Status"])) == (["digits_cnn"], ["finished"])
    size = sum(path.stat().st_size for path in (server.runs / "one").iterdir())
    assert list(table["Size"]) == [size / 2**20]
    app.session_state["run"] = "one"
    app.switch_page("views/run.py").run()
    assert component(app)["run"] == "one"


def runs_page(page: OpenPage, **params: str) -> AppTest:
    app = at_address(page, "runs", **params)
    assert not app.exception
    return app


def run_ticked(app: AppTest, *indices: int) -> None:
    """Run the page with these rows ticked, which AppTest forgets after each run."""
    states = app._tree.get_widget_states()
    chosen = {"selection": {"rows": list(indices), "columns": [], "cells": []}}
    states.widgets.add(id=app.dataframe[0].proto.id, string_value=json.dumps(chosen))
    app._run(states)
    assert not app.exception


def test_the_page_searches_and_shows_chosen_columns_from_its_address(
    page: OpenPage, server: Services
) -> None:
    record(server.runs, "one", config={"lr": 0.5}, tags=["kept"])
    record(server.runs, "two", config={"lr": 0.1})
    app = runs_page(page)
    app.text_input(key="search").set_value("lr>0.2").run()
    assert list(app.dataframe[0].value["Tags"]) == ["kept"]
    app.multiselect(key="columns").set_value(["Name", "config: lr", "final: train/loss"]).run()
    table = app.dataframe[0].value
    assert list(table.columns) == ["Name", "config: lr", "final: train/loss"]
    assert table.to_numpy().tolist() == [["digits_cnn", 0.5, 1.0]]


def test_ticked_runs_are_renamed_tagged_and_pinned(page: OpenPage, server: Services) -> None:
    record(server.runs, "one")
    record(server.runs, "two")
    app = runs_page(page)
    run_ticked(app, 0)
    label(app, "text_input", "Name").set_value("best [1]")
    label(app, "multiselect", "Tags").set_value(["kept"])
    label(app, "checkbox", "Pin").set_value(True)
    label(app, "button", "Save").click()
    run_ticked(app, 0)
    (edited,) = [row for row in server.run_list.rows() if row.pinned]
    edit_notes(server.runs / "two", group="as before")
    run_ticked(app, 0, 1)
    label(app, "multiselect", "Tags").set_value(["kept", "added"])
    label(app, "button", "Save").click()
    run_ticked(app, 0, 1)
    first, second = (read_metadata(read_run(server.runs / name)) for name in ("one", "two"))
    assert {first.tags, second.tags} == {("added",), ("kept", "added")}
    assert second.group == "as before"
    assert (edited.cells["Name"], edited.cells["Tags"]) == ("best [1]", "kept")


def test_runs_are_deleted_after_a_question_but_not_pinned_or_live_ones(
    page: OpenPage, server: Services
) -> None:
    edit_notes(record(server.runs, "pinned"), pinned=True)
    record(server.runs, "old")  # of this live process, as a built-in run of the server
    new = server.runs / "live"
    new.mkdir()
    live = Recorder(new, name="x")
    app = runs_page(page)
    run_ticked(app, 0, 1, 2)
    before = app.dataframe[0].proto.id
    app.button(key=confirm_key(app)).click()
    run_ticked(app, 0, 1, 2)
    assert app.dataframe[0].proto.id != before, "a table without ticks"
    live.close(RunStatus.FINISHED)
    assert (new.exists(), (server.runs / "old").exists()) == (True, False)
    assert (server.runs / "pinned").exists()
    assert len(app.warning) == 2, "one for each that stays"
    app.run()
    assert len(app.warning) == 2, "also after the table was drawn again"
    app.switch_page("views/hardware.py").run()
    app.switch_page("views/runs.py").run()
    assert not app.warning


GONE = {"pid": 2**22 + 1}


def test_a_confirmed_deletion_never_removes_a_run_that_the_question_did_not_name(
    page: OpenPage, server: Services
) -> None:
    for name in "abcd":
        record(server.runs, name, **GONE)
    app = runs_page(page)
    run_ticked(app, 1)
    shown = [row.id for row in server.run_list.rows()]
    shutil.rmtree(server.runs / shown[0])  # by another program
    app.button(key=confirm_key(app)).click()
    run_ticked(app, 1)
    assert {row.id for row in server.run_list.rows()} == set(shown[1:])
    run_ticked(app, 1)  # the second of three
    app.text_input(key="search").set_value(shown[3])
    app.button(key=confirm_key(app)).click()
    run_ticked(app, 1)
    assert {row.id for row in server.run_list.rows()} == set(shown[1:])


def confirm_key(app: AppTest) -> str:
    return next(str(each.key) for each in app.button if str(each.key).startswith("delete_"))


def test_unreadable_runs_are_named_with_the_reason(page: OpenPage, server: Services) -> None:
    torn = record(server.runs, "torn")
    (torn / "run.json").write_text("{")
    app = runs_page(page)
    assert "torn" in app.warning[0].value
    assert not app.dataframe
    record(server.runs, "one")
    app.run()
    shutil.rmtree(torn)
    app.run()
    assert (len(app.warning), len(app.dataframe[0].value)) == (0, 1)


def test_a_runs_folder_that_cannot_be_read_is_named_with_the_reason(
    page: OpenPage, server: Services
) -> None:
    named = escape_markdown(str(server.runs))
    server.runs.rmdir()
    app = page()
    assert [named in warning.value for warning in app.warning] == [True]
    app.switch_page("views/runs.py").run()
    assert [named in warning.value for warning in app.warning] == [True]
    app = page(run="one")
    assert str(server.runs) in header(app)["trouble"]
