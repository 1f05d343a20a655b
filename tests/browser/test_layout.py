"""Nothing on the page is cut or drawn over: texts in tiles, boxes and charts at usual widths."""

from __future__ import annotations

import re
import time
from typing import Any

import pytest
from playwright.sync_api import FloatRect, Locator, Page, expect

from stepscope.run import RunStatus
from stepscope.store.recorder import Recorder
from tests.support.browser_page import OpenPage, wait_until
from tests.support.server import Server

GIB = 2**30
GPUS = [
    {"uuid": f"GPU-{n}", "name": "NVIDIA H100 80GB HBM3", "memory_total": 80 * GIB}
    for n in range(8)
]


def record(server: Server, gpus: list[dict[str, Any]], epochs: int = 0) -> str:
    """Write a finished run on these large GPUs, whose numbers are as long as they get."""
    folder = server.runs / f"gpus{len(gpus)}-{time.time_ns()}"
    folder.mkdir(parents=True)
    recorder = Recorder(folder, name="train")
    device = gpus[0]["uuid"] if gpus else "cpu"
    recorder.describe(config={"device": device}, devices=gpus, total_steps=1_000_000, epochs=1000)
    recorder.set_status(RunStatus.RUNNING)
    recorder.epoch = 999
    values = {"train/loss": 1e-6, "perf/samples_per_sec": 123_456.0, "train/epoch": 999.0}
    for step in range(999_700, 1_000_000):
        recorder.log(step, values | {"perf/step_time": 0.01 + 0.001 * (step % 7)})
    for epoch in range(1, epochs + 1):
        recorder.epoch = epoch
        recorder.event("epoch", f"Epoch {epoch}: validation loss {1 / epoch:.4g}")
    recorder.epoch = 999
    recorder.log(1_000_000, {"val/loss": 0.1234, "val/accuracy": 97.53})
    names = ("memory/allocated", "memory/reserved", "memory/peak_allocated", "process/rss")
    recorder.sample(dict.fromkeys(names, 1023.4 * 2**20))
    values = {"gpu/mem_used": 70.5 * GIB, "gpu/mem_total": 80.0 * GIB}
    values |= {"gpu/temp": 77.0, "gpu/power": 699.9}
    for place, gpu in enumerate(gpus):
        for _ in range(2):
            recorder.sample(values | {"gpu/util": 100.0 - 10 * place}, str(gpu["uuid"]))
    recorder.event("empty_cache", "Empty cache")
    recorder.close(RunStatus.FINISHED)
    return folder.name


PAGES = ["Run", "Runs", "Lab", "Hardware", "Learn"]
CUT = """nodes => nodes.filter((node) => node.scrollWidth > node.clientWidth)
    .map((node) => node.value ?? node.textContent)"""


def cut(page: Page, selector: str) -> list[str]:
    """Return the texts that are wider than their boxes."""
    nodes = page.locator(selector)
    expect(nodes.first).to_be_visible()
    found: list[str] = nodes.evaluate_all(CUT)
    return found


def box(part: Locator) -> FloatRect:
    found = part.bounding_box()
    assert found is not None
    return found


def inside(inner: FloatRect, outer: FloatRect) -> bool:
    """Return True if a box is between the left and the right edge of another."""
    right = outer["x"] + outer["width"]
    return outer["x"] <= inner["x"] and inner["x"] + inner["width"] <= right


@pytest.fixture
def run(server: Server) -> str:
    """A run on two GPUs."""
    return record(server, GPUS[:2], epochs=40)


@pytest.mark.parametrize(("width", "workload"), [(1400, "memory_stress"), (1280, "linear")])
def test_numbers_and_choices_are_whole(
    open_page: OpenPage, run: str, width: int, workload: str
) -> None:
    page = open_page(f"/?run={run}&workload={workload}")
    page.set_viewport_size({"width": width, "height": 1000})
    allocated = page.get_by_test_id("kpi-allocated")
    expect(allocated).to_contain_text("80.0 GiB")
    expect(page.get_by_test_id("kpi-loss")).to_contain_text("98%")
    expect(page.get_by_test_id("kpi-gpu_util")).to_contain_text("90–100%")
    assert cut(page, ".ss-kpi, .ss-num, .ss-detail") == []
    assert cut(page, "[data-testid=stSidebar] [role=combobox]") == []
    rows = page.get_by_test_id("events").locator("tbody tr")
    expect(rows).to_have_count(2)
    expect(rows.last).to_contain_text("Epoch × 40")
    if width == 1400:
        tops = page.locator(".ss-kpi").evaluate_all("nodes => nodes.map((node) => node.offsetTop)")
        assert len(tops) > 5
        assert len(set(tops)) == 1, "one row"


def test_charts_are_whole_and_reached_by_keyboard(open_page: OpenPage, run: str) -> None:
    page = open_page(f"/?run={run}")
    live = page.get_by_test_id("stepscope-live")
    expect(live).to_have_attribute("data-ready", "1")
    for name in ("loss", "memory", "utilization", "step_time"):  # on the first screen
        place = box(page.get_by_test_id(f"chart-{name}"))
        assert place["y"] + place["height"] <= 1000
    lines = page.get_by_test_id("chart-step_time").locator(".js-plotly-plot")
    bands = lines.evaluate("node => node.data.map((line) => line.fillcolor).filter(Boolean)")
    assert bands, "several steps in a point"
    assert all(0.1 <= float(band.rstrip(")").split(",")[-1]) <= 0.15 for band in bands)

    loss = page.get_by_test_id("chart-loss")
    stage = loss.locator(".ss-stage")

    def whole_ticks() -> bool:
        """No number of an axis is cut; in one call, as a redraw replaces the numbers."""
        *ticks, whole = stage.evaluate(
            """stage => [...stage.querySelectorAll(".xtick text, .ytick text"), stage]
                .map((node) => node.getBoundingClientRect().toJSON())
                .filter((place) => place.width)"""
        )
        return len(ticks) > 4 and all(inside(tick, whole) for tick in ticks)

    wait_until(whole_ticks, page)  # plotly.js widens the margins in a second drawing

    loss.get_by_role("button", name="log").focus()
    page.keyboard.press("Tab")
    expect(stage).to_be_focused()
    assert stage.evaluate("node => getComputedStyle(node).outlineStyle") == "solid"
    page.keyboard.press("ArrowLeft")
    expect(loss.locator(".hoverlayer")).to_contain_text(re.compile(r"step 999,\d{3}"))

    # A mark at the end of the run keeps off the right axis.
    page.get_by_test_id("more").locator("summary").click()
    power = page.get_by_test_id("chart-power")
    power.scroll_into_view_if_needed()
    label = power.locator(".annotation-text").last
    expect(label).to_have_text("cache")
    area = power.locator(".nsewdrag").first
    wait_until(lambda: inside(box(label), box(area)), page)  # it may be drawn once more


def test_the_navigation_names_every_page_and_cuts_no_name(open_page: OpenPage) -> None:
    page = open_page("/")
    navigation = page.get_by_test_id("stTopNav")
    links, rest = navigation.get_by_role("link"), navigation.get_by_role("button")
    for width in (1400, 800):
        page.set_viewport_size({"width": width, "height": 800})
        expect(page.get_by_test_id("stSidebar")).to_be_visible()
        expect(links).to_have_text(PAGES)
        expect(rest).to_have_count(0)
    # Like next to a sidebar that was dragged wider.
    page.add_style_tag(content="[data-testid=stSidebar] { min-width: 380px }")
    ends = (links.first, links.last)
    wait_until(lambda: all(inside(box(item), box(navigation)) for item in ends), page)
