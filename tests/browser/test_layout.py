"""Nothing on the page is cut or drawn over: texts in tiles, boxes and charts at usual widths."""

from __future__ import annotations

from typing import Any

import pytest
from playwright.sync_api import Page, expect

from stepscope.recording.recorder import Recorder
from stepscope.run import RunStatus
from tests.browser.conftest import Server
from tests.browser.test_live_page import OpenPage

GIB = 2**30
GPUS = [
    {"uuid": f"GPU-{n}", "name": "NVIDIA H100 80GB HBM3", "memory_total": 80 * GIB}
    for n in range(2)
]
CUT = """nodes => nodes.filter((node) => node.scrollWidth > node.clientWidth)
    .map((node) => node.value ?? node.textContent)"""


def cut(page: Page, selector: str) -> list[str]:
    """Return the texts that do not fit where they stand."""
    nodes = page.locator(selector)
    expect(nodes.first).to_be_visible()
    found: list[str] = nodes.evaluate_all(CUT)
    return found


@pytest.fixture
def run(server: Server) -> str:
    """A finished run on two large GPUs, whose numbers are as long as they get."""
    folder = server.runs / "cuda"
    folder.mkdir(parents=True)
    recorder = Recorder(folder, name="train")
    recorder.describe(device="GPU-0", devices=GPUS, total_steps=1_000_000, epochs=1000)
    recorder.set_status(RunStatus.RUNNING)
    recorder.epoch = 999
    for step in range(999_700, 1_000_000):
        recorder.log(
            step,
            {
                "train/loss": 1.5 / step,
                "perf/samples_per_sec": 123_456.0,
                "perf/step_time": 0.01,
                "train/epoch": 999.0,
            },
        )
    recorder.log(1_000_000, {"val/loss": 0.1234, "val/accuracy": 97.53})
    recorder.sample(
        {f"memory/{name}": 1023.4 * 2**20 for name in ("allocated", "reserved", "peak_allocated")}
    )
    for gpu in GPUS:
        values: dict[str, Any] = {
            "gpu/util": 100.0,
            "gpu/mem_used": 70.5 * GIB,
            "gpu/temp": 77.0,
            "gpu/mem_total": 80.0 * GIB,
            "gpu/power": 699.9,
        }
        recorder.device(str(gpu["uuid"]), values)
        recorder.device(str(gpu["uuid"]), values)
    recorder.event("empty_cache", "Empty cache")
    recorder.close(RunStatus.FINISHED)
    return folder.name


@pytest.mark.parametrize(("width", "workload"), [(1400, "fill"), (1280, "linear")])
def test_numbers_and_choices_are_whole(
    open_page: OpenPage, server: Server, run: str, width: int, workload: str
) -> None:
    page = open_page(f"/?run={run}&workload={workload}")
    page.set_viewport_size({"width": width, "height": 1000})
    expect(page.get_by_test_id("kpi-allocated")).to_contain_text("80.0 GiB", timeout=30_000)
    expect(page.get_by_test_id("kpi-loss")).to_contain_text("val 0.123 · 98 %")
    assert cut(page, ".ss-kpi-label, .ss-num, .ss-detail") == []
    assert cut(page, "[data-testid=stSidebar] [role=combobox]") == []


def test_a_mark_at_the_end_of_the_run_keeps_off_the_right_axis(
    open_page: OpenPage, run: str
) -> None:
    page = open_page(f"/?run={run}")
    power = page.get_by_test_id("chart-power")
    power.scroll_into_view_if_needed(timeout=30_000)
    label = power.locator(".ss-marks text")
    expect(label).to_have_text("cache", timeout=30_000)
    plot = power.locator(".nsewdrag").first
    marks, box = power.locator(".ss-marks").bounding_box(), plot.bounding_box()
    assert marks is not None
    assert box is not None
    # Its letters alone: the ground's color around them may reach over the line.
    end = label.evaluate("node => node.getBBox().x + node.getBBox().width")
    assert marks["x"] + end <= box["x"] + box["width"]


def test_no_number_of_an_axis_is_cut(open_page: OpenPage, run: str) -> None:
    page = open_page(f"/?run={run}")
    loss = page.get_by_test_id("chart-loss")
    expect(loss.locator(".xtick text").first).to_be_visible(timeout=30_000)
    stage = loss.locator(".ss-stage").bounding_box()
    assert stage is not None
    boxes = [tick.bounding_box() for tick in loss.locator(".xtick text, .ytick text").all()]
    shown = [box for box in boxes if box is not None]
    assert len(shown) > 4
    for box in shown:
        assert stage["x"] <= box["x"]
        assert box["x"] + box["width"] <= stage["x"] + stage["width"]
