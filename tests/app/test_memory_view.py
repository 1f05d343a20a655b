"""The Memory tab without a browser: which run, which memory, reasons of missing values."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from streamlit.testing.v1 import AppTest

from stepscope.run import RunKind
from tests.support.app_page import OpenPage, text_of, trigger
from tests.support.breakdown_rows import GPU, PROCESSES, device, process, sample
from tests.support.recorded_runs import write_run

A100 = {"uuid": GPU, "name": "NVIDIA A100", "memory_total": 10 * 2**30}
ON_GPU = {"device": GPU, "kind": RunKind.WATCH, "devices": [A100], "name": "train.py", "pid": 1}


def breakdown(app: AppTest) -> tuple[list[str], list[str]]:
    """Return the categories of the table, and the areas of the chart."""
    [chart] = app.get("plotly_chart")
    areas = [area["name"] for area in json.loads(chart.proto.spec)["data"]]
    return [name.strip() for name in app.dataframe[0].value["Category"]], areas


def cuda_run(root: Path, **run_json: Any) -> None:
    rows = [process(tick) for tick in range(20)]
    gpu = [device(tick) for tick in range(20)]
    write_run(root / "cuda", ON_GPU | run_json, gpu=GPU, samples=rows, devices=gpu)


def test_each_run_has_its_breakdown_and_the_address_follows(page: OpenPage, tmp_path: Path) -> None:
    rows = [sample(tick, process__rss=900, host__mem_total=8000) for tick in range(5)]
    write_run(tmp_path / "cpu", {"device": "cpu", "name": "digits"}, samples=rows)
    cuda_run(tmp_path, gpu_processes={GPU: PROCESSES})
    app = page(tab="memory", run="cuda")
    categories, areas = breakdown(app)
    assert set(areas) < set(categories)
    [_, table] = app.dataframe
    assert list(table.value["PID"])[:2] == [3, 2]
    assert "train.py" not in list(table.value["Name"])  # the run itself
    trigger(app, "run", "cpu")
    categories, areas = breakdown(app)
    assert categories == ["this process", "rest of this process", "total"]
    assert areas == ["rest of this process"]
    assert len(app.dataframe) == 1, "without the processes of a GPU"


@pytest.mark.parametrize(
    ("run_json", "text"),
    [
        (
            {"capabilities": {"missing": {GPU: {"processes": "hidden"}}}},
            "hidden",
        ),
        ({"gpu_processes": {GPU: [{"pid": 1, "name": "train.py"}]}}, "None."),
        *(
            ({"devices": devices, "gpu_processes": "none", "capabilities": 3}, GPU)
            for devices in (7, [None], [{"name": "A100"}])
        ),
    ],
)
def test_without_a_list_of_processes_the_page_has_the_reason(
    page: OpenPage, tmp_path: Path, run_json: dict[str, Any], text: str
) -> None:
    cuda_run(tmp_path, **run_json)
    app = page(tab="memory", run="cuda")
    assert text in text_of(app)
    assert len(app.dataframe) == 1, "the breakdown"
