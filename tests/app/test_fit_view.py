"""Estimate memory: progress, result, refusal, and the recommended batch."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from dashboard.format import escape_markdown
from dashboard.services import ServerActivity, Services
from dashboard.views.new_run_panels import batch_rows, rows
from stepscope.host.child_process import ChildOutput, ChildState
from stepscope.run import RunError
from tests.support.app_page import OpenPage, label, text_of
from trainer.config import RunConfig, Workload, defaults

GIB = 2**30

ANSWER: dict[str, Any] = {
    "predicted_peak_bytes": 3 * GIB,
    "parts": {"parameters": GIB, "activations": 2 * GIB, "workspace": 0},
    "predicted_reserved_bytes": None,
    "outside": {"data_set": GIB},
    "needed_bytes": 4 * GIB,
    "device_name": "a CPU",
    "free_bytes": 8 * GIB,
    "margin": {"factor": 1.1},
    "fits": True,
    "reason": "It needs 4.00 GiB, and 8.00 GiB are free.",
    "notes": ["Something is not predicted."],
    "largest": {
        "points": [
            {
                "batch_size": size,
                "predicted_peak_bytes": size * GIB // 100,
                "needed_bytes": size * GIB // 90,
                "samples_per_sec": rate,
            }
            for size, rate in ((64, None), (128, 900.0), (256, 1000.0), (1024, None))
        ],
        "free_bytes": 8 * GIB,
        "recommended": 256,
        "why": "256 reaches 1,000 samples/s.",
        "not_measured": ["512: not measured, a step would take about 9 s"],
    },
}


def ended(server: Services, config: RunConfig, output: ChildOutput) -> None:
    """Make this the last prediction, in the place of a child process that has ended."""
    child: Any = SimpleNamespace(
        config=config, output=lambda: output, running=lambda: False, stop=lambda: None
    )
    server.estimates.keep(child)


def test_the_settings_of_the_sidebar_are_predicted(page: OpenPage, server: Services) -> None:
    app = page(workload="linear", device="cpu", batch_size="256")
    label(app, "button", "Estimate memory").click().run()
    assert not app.exception
    run = server.estimates.last()
    assert run is not None
    assert run.config.batch_size == 256
    assert run.wait(120)
    app.run()
    assert not app.exception
    assert run.output().state is ChildState.FINISHED, run.output()
    assert len(app.success) == 1, "it fits"
    table = app.dataframe[0].value
    assert {"Parameters", "Predicted peak", "Free now"} <= set(table["Memory"])
    assert run.output().answer["parts"]["parameters"] == 8
    label(app, "button", "Close").click().run()
    assert server.estimates.last() is None
    assert not app.success


def test_a_prediction_can_be_stopped(page: OpenPage, server: Services) -> None:
    app = page(workload="gpt", device="cpu")
    label(app, "button", "Estimate memory").click().run()
    with pytest.raises(RunError):
        server.begin(ServerActivity.LESSON, lambda: None)
    assert label(app, "button", "Find max batch size").disabled
    label(app, "button", "Stop").click().run()
    run = server.estimates.last()
    assert run is not None
    assert run.output().state is ChildState.STOPPED
    app.run()
    assert not app.success
    assert not app.error


def test_settings_that_cannot_start_have_no_button_and_only_the_finder_waits_for_a_run(
    page: OpenPage, server: Services
) -> None:
    app = page(workload="linear", device="cpu", precision="tf32")
    assert "Estimate memory" not in [button.label for button in app.button]
    server.active_id = lambda: "one"  # type: ignore[method-assign]
    assert server.busy_reason(ServerActivity.BATCH_SIZE_FINDER) is not None
    assert server.busy_reason(ServerActivity.ESTIMATE) is None


def test_the_recommended_batch_can_be_applied_and_a_failure_has_its_reason(
    page: OpenPage, server: Services
) -> None:
    config = replace(defaults(Workload.LINEAR), batch_size=128)
    output = ChildOutput(ChildState.FINISHED, seconds=3.0, answer=ANSWER)
    ended(server, config, output)
    app = page(workload="linear", device="cpu", batch_size="128")
    largest = ANSWER["largest"]
    for text in (largest["why"], *largest["not_measured"], *ANSWER["notes"]):
        assert escape_markdown(text) in text_of(app)
    notes = len(app.caption)
    app.button(key="fit_use").click().run()
    assert app.number_input(key="config_batch_size").value == 256
    assert len(app.caption) > notes, "the settings have changed since"
    ended(server, config, ChildOutput(ChildState.FAILED, reason="It <b>broke."))
    app.run()
    assert r"\<b\>broke" in app.error[0].value


def test_the_tables_have_what_was_predicted() -> None:
    table = {row["Memory"]: row["Size"] for row in rows(ANSWER)}
    assert "Library workspaces" not in table
    assert (table["Predicted peak"], table["Dataset in memory"]) == ("3.00 GiB", "1.00 GiB")
    points = batch_rows(ANSWER["largest"])
    assert [row["Batch size"] for row in points] == [64, 128, 256, 1024]
    assert [row["Samples/s"] for row in points] == [None, 900.0, 1000.0, None]
    assert points[2]["Needed, with margin"] == "2.84 GiB"
