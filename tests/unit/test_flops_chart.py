"""The folded chart of model FLOPs, and the reasons that it shows."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest

from dashboard.charts.layout import layout
from dashboard.charts.run_view import RunView, run_content
from stepscope.run import RunInfo, RunKind, RunStatus
from tests.support.javascript import Script
from tests.support.javascript import js as js


def flops_chart(content: RunView) -> dict[str, Any] | None:
    charts: Iterator[dict[str, Any]] = iter(layout(content)["charts"])
    return next((chart for chart in charts if chart["id"] == "flops"), None)


def test_speed_and_share_have_an_axis_each() -> None:
    chart = flops_chart(RunView(has_cuda=True))
    assert chart is not None
    drawn = {line["metric"]: (line["axis"], line["optional"]) for line in chart["traces"]}
    assert drawn == {"perf/tflops": ("y", True), "perf/mfu": ("y2", True)}
    assert (chart["group"], chart["y"]["unit"], chart["y2"]["unit"]) == ("more", "TFLOP/s", "%")


def test_reasons_of_the_run_stand_in_it(tmp_path: Any) -> None:
    told = {"flops_reason": "Not counted: x.", "peak_reason": "No share of a peak: y."}
    chart = flops_chart(run_content(RunInfo(tmp_path, RunStatus.RUNNING, None, 0.0, told)))
    assert chart is not None
    assert (chart["empty"], chart["note"]) == ("Not counted: x.", "No share of a peak: y.")
    (line,) = chart["traces"]
    assert (line["metric"], chart["y2"]) == ("perf/tflops", None)
    assert line["optional"] is False  # the chart stays, with its reason
    foreign = run_content(RunInfo(tmp_path, RunStatus.RUNNING, None, 0.0, {"peak_reason": 3}))
    assert foreign.peak_reason is None


def test_a_script_has_no_such_chart() -> None:
    assert flops_chart(replace(RunView(has_cuda=True), kind=RunKind.WATCH)) is None


@pytest.mark.parametrize(
    ("value", "text"),
    [(412.3, "412 TFLOP/s"), (0.0189, "18.9 GFLOP/s"), (2e-5, "20.0 MFLOP/s"), (0, "0 MFLOP/s")],
)
def test_small_speeds_have_smaller_units(js: Script, value: float, text: str) -> None:
    assert js('withUnit(value, "TFLOP/s")', value=value) == text
