"""Estimate memory: progress, result, refusal, and the recommended batch."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import pytest
from streamlit.testing.v1 import AppTest

from dashboard import services
from dashboard.charts.batch_size_curve import batch_figure
from dashboard.services import Services
from dashboard.views.estimate_panel import rows
from stepscope.run import RunError
from tests.support.app_page import label
from trainer.config import RunConfig, Workload, defaults
from trainer.lessons import LESSONS
from trainer.runners.child_process import ChildOutput, ChildState

OpenPage = Callable[..., AppTest]
GIB = 2**30

ANSWER: dict[str, Any] = {
    "predicted_peak_bytes": 3 * GIB,
    "parts": {"parameters": GIB, "activations": 2 * GIB, "workspace": 0},
    "predicted_reserved_bytes": None,
    "outside": {"data_set": GIB},
    "needed_bytes": 4 * GIB,
    "device": "cpu",
    "device_name": "a CPU",
    "free_bytes": 8 * GIB,
    "total_bytes": 16 * GIB,
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
        "headroom": 0.1,
        "largest": 256,
        "recommended": 256,
        "why": "256 reaches 1,000 samples/s.",
        "not_measured": ["512: not measured, a step would take about 9 s"],
    },
}


def text_of(app: AppTest) -> str:
    kinds = ("markdown", "caption", "success", "warning", "error", "info")
    return "\n".join(str(getattr(one, "value", "")) for kind in kinds for one in app.get(kind))


class Ended:
    """A prediction that has ended, in the place of a child process."""

    def __init__(self, config: RunConfig, output: ChildOutput) -> None:
        self.config = config
        self.largest = True
        self._output = output

    def output(self) -> ChildOutput:
        """Return the final output."""
        return self._output

    def running(self) -> bool:
        """Return False."""
        return False

    def stop(self, timeout_s: float = 0.0) -> None:
        """Do nothing."""


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
    assert "It fits." in text_of(app)
    table = app.dataframe[0].value
    assert {"Parameters", "Predicted peak", "Free now"} <= set(table["Memory"])
    assert run.output().answer["parts"]["parameters"] == 8
    label(app, "button", "Close").click().run()
    assert server.estimates.last() is None
    assert "It fits." not in text_of(app)


def test_a_prediction_can_be_stopped(page: OpenPage, server: Services) -> None:
    app = page(workload="gpt", device="cpu")
    label(app, "button", "Estimate memory").click().run()
    with pytest.raises(RunError, match="memory estimate is running"):
        server.start_estimate(defaults(Workload.LINEAR), largest=False)
    assert label(app, "button", "Find max batch size").disabled
    label(app, "button", "Stop").click().run()
    run = server.estimates.last()
    assert run is not None
    assert run.output().state is ChildState.STOPPED
    app.run()
    assert "stopped" in text_of(app)


def test_settings_that_cannot_start_have_no_button(page: OpenPage) -> None:
    for precision, offered in (("fp32", True), ("tf32", False)):
        app = page(workload="linear", device="cpu", precision=precision)
        assert ("Estimate memory" in [button.label for button in app.button]) is offered


def test_the_largest_batch_waits_for_a_run(page: OpenPage, server: Services) -> None:
    server.active_id = lambda: "one"  # type: ignore[method-assign]
    reason = server.busy_reason(services.ServerActivity.BATCH_SIZE_FINDER)
    assert "one is active" in str(reason)
    assert server.busy_reason(services.ServerActivity.ESTIMATE) is None


def test_the_recommended_batch_can_be_applied(page: OpenPage, server: Services) -> None:
    config = replace(defaults(Workload.LINEAR), batch_size=128)
    output = ChildOutput(ChildState.FINISHED, seconds=3.0, answer=ANSWER)
    server.estimates.start(lambda: cast(Any, Ended(config, output)))
    app = page(workload="linear", device="cpu", batch_size="128")
    said = text_of(app)
    assert "256 reaches 1,000 samples/s" in said
    assert "a step would take about 9 s" in said
    assert "Something is not predicted" in said
    label(app, "button", "Use batch size 256").click().run()
    assert app.number_input(key="config_batch_size").value == 256
    assert ":material/info: Settings changed since this estimate. Run it again." in text_of(app)


def test_a_failure_is_a_sentence(page: OpenPage, server: Services) -> None:
    output = ChildOutput(ChildState.FAILED, reason="It <b>broke.")
    server.estimates.start(lambda: cast(Any, Ended(defaults(Workload.LINEAR), output)))
    assert "No estimate." in text_of(page(workload="linear", device="cpu"))


def test_the_table_and_the_curve_have_what_was_predicted() -> None:
    table = {row["Memory"]: row["Size"] for row in rows(ANSWER)}
    assert "Library workspaces" not in table
    assert (table["Predicted peak"], table["Dataset in memory"]) == ("3.00 GiB", "1.00 GiB")
    figure = batch_figure(ANSWER["largest"])
    assert figure is not None
    memory, rate = figure["data"]
    assert memory["x"] == [64, 128, 256, 1024]
    assert memory["y"][2] == pytest.approx(256 / 90, rel=1e-6)
    assert (rate["x"], rate["y"]) == ([128, 256], [900.0, 1000.0])
    free, recommended = figure["layout"]["shapes"]
    assert free["y0"] == 8.0
    assert recommended["x0"] == 256
    assert batch_figure({"points": []}) is None


def test_the_curve_has_a_unit_that_fits_and_no_limit_far_above_it() -> None:
    point = {"batch_size": 8, "needed_bytes": 3 * 2**20, "samples_per_sec": None}
    figure = batch_figure({"points": [point], "free_bytes": 4 * 2**20})
    assert figure is not None
    assert figure["data"][0]["y"] == [3.0]
    assert figure["layout"]["yaxis"]["title"]["text"] == "MiB"
    assert figure["layout"]["annotations"][0]["text"] == "free: 4 MiB"
    figure = batch_figure({**ANSWER["largest"], "free_bytes": 10**15, "recommended": None})
    assert figure is not None
    assert figure["layout"]["shapes"] == []


def test_a_server_that_ends_ends_the_prediction(server: Services, tmp_path: Path) -> None:
    server.start_estimate(defaults(Workload.GPT), largest=False)
    run = server.estimates.last()
    assert run is not None
    with pytest.raises(RunError, match="memory estimate is running"):
        server.start_lesson(LESSONS[0])
    server.close()
    assert not run.running()
