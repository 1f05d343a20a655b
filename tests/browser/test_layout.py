"""Nothing on the page is cut or drawn over: texts in tiles, boxes and charts at usual widths."""

from __future__ import annotations

import pytest
from playwright.sync_api import Page, expect

from tests.support.browser_page import OpenPage, wait_until
from tests.support.large_gpus import GPUS, record
from tests.support.server import Server

PAGES = ["Run", "Runs", "Lab", "Hardware", "Learn"]
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
    """A run on two GPUs."""
    return record(server, GPUS[:2], epochs=40)


@pytest.mark.parametrize(("width", "workload"), [(1400, "memory_stress"), (1280, "linear")])
def test_numbers_and_choices_are_whole(
    open_page: OpenPage, server: Server, run: str, width: int, workload: str
) -> None:
    page = open_page(f"/?run={run}&workload={workload}")
    page.set_viewport_size({"width": width, "height": 1000})
    allocated = page.get_by_test_id("kpi-allocated")
    expect(allocated).to_contain_text("MiB of 80.0 GiB", timeout=30_000)
    expect(page.get_by_test_id("kpi-loss")).to_contain_text("val 0.123 · 98%")
    expect(page.get_by_test_id("kpi-gpu_util")).to_contain_text("90–100%")
    assert cut(page, ".ss-kpi, .ss-kpi-label, .ss-num, .ss-detail") == []
    assert cut(page, "[data-testid=stSidebar] [role=combobox]") == []
    if width == 1400:
        tops = page.locator(".ss-kpi").evaluate_all("nodes => nodes.map((node) => node.offsetTop)")
        assert len(tops) > 5
        assert len(set(tops)) == 1, "one row"


def bottom(page: Page, chart: str) -> float:
    box = page.get_by_test_id(f"chart-{chart}").bounding_box()
    assert box is not None
    return box["y"] + box["height"]


def test_the_first_screen_has_the_first_four_charts(open_page: OpenPage, run: str) -> None:
    page = open_page(f"/?run={run}")
    expect(page.get_by_test_id("stepscope-live")).to_have_attribute(
        "data-ready", "1", timeout=30_000
    )
    for chart in ("loss", "memory", "utilization", "step_time"):
        assert bottom(page, chart) <= 1000
    lines = page.get_by_test_id("chart-step_time").locator(".js-plotly-plot")
    bands = lines.evaluate("node => node.data.map((line) => line.fillcolor).filter(Boolean)")
    assert bands, "several steps in a point"
    assert all(0.1 <= float(band.rstrip(")").split(",")[-1]) <= 0.15 for band in bands)


def test_epochs_are_one_line_of_the_events_until_asked_for(open_page: OpenPage, run: str) -> None:
    page = open_page(f"/?run={run}")
    rows = page.get_by_test_id("events").locator("tbody tr")
    expect(rows).to_have_count(2, timeout=30_000)
    expect(rows.last).to_contain_text("Epochs 1–40", use_inner_text=True)
    expect(rows.last).to_contain_text("last: validation loss 0.025")
    rows.last.get_by_role("button").click()
    expect(rows).to_have_count(40)
    expect(rows.first).to_contain_text("Epoch 40")
    page.get_by_label("Filter events").select_option("Commands")
    expect(rows).to_have_count(1)


def test_a_row_of_heat_leads_to_the_lines_of_its_gpu(open_page: OpenPage, server: Server) -> None:
    page = open_page(f"/?run={record(server, GPUS)}")
    chart = page.get_by_test_id("chart-utilization")
    drawn = chart.locator(".js-plotly-plot")
    kinds = "node => node.data.map((trace) => `${trace.type} ${trace.name ?? trace.z.length}`)"
    expect(chart.locator(".xtick text").first).to_be_visible(timeout=30_000)
    assert drawn.evaluate(kinds) == ["heatmap 8"]
    legend, plot = chart.locator(".ss-legend").bounding_box(), chart.locator(".ss-stage")
    box = plot.bounding_box()
    assert legend is not None
    assert box is not None
    assert legend["height"] <= 44
    row = chart.locator(".ytick text", has_text="5").bounding_box()
    assert row is not None
    plot.click(position={"x": 200, "y": row["y"] + row["height"] / 2 - box["y"]})
    expect(chart.locator(".ss-chip:visible")).to_have_count(1, timeout=20_000)
    expect(chart.locator(".ss-chip:visible")).to_have_text("GPU 550%", timeout=20_000)
    wait_until(lambda: drawn.evaluate(kinds) == ["scatter GPU 5"], page, 20)  # a frame later
    chart.get_by_role("button", name="All GPUs").click()
    expect(chart.locator(".ss-chip:visible")).to_have_count(8)
    chart.get_by_role("button", name="GPU 3").press("Enter")  # without a mouse
    expect(chart.locator(".ss-chip:visible")).to_have_count(1, timeout=20_000)
    expect(chart.locator(".ss-chip:visible")).to_have_text("GPU 370%", timeout=20_000)


def test_without_a_gpu_its_tiles_are_not_drawn_and_one_line_says_why(
    open_page: OpenPage, server: Server
) -> None:
    page = open_page(f"/?run={record(server, [])}")
    live = page.get_by_test_id("stepscope-live")
    expect(page.get_by_test_id("kpi-process_memory")).to_contain_text("MiB", timeout=30_000)
    expect(page.get_by_test_id("absent")).to_contain_text("no GPU was sampled in this run")
    assert live.inner_text().count("no GPU was sampled") == 1
    for tile in ("gpu_util", "power", "allocated"):
        expect(page.get_by_test_id(f"kpi-{tile}")).to_have_count(0)


def test_a_mark_at_the_end_of_the_run_keeps_off_the_right_axis(
    open_page: OpenPage, run: str
) -> None:
    page = open_page(f"/?run={run}")
    page.get_by_test_id("more").locator("summary").click(timeout=30_000)
    power = page.get_by_test_id("chart-power")
    power.scroll_into_view_if_needed(timeout=30_000)
    label = power.locator(".annotation-text").last
    expect(label).to_have_text("cache", timeout=30_000)
    words, box = label.bounding_box(), power.locator(".nsewdrag").first.bounding_box()
    assert words is not None
    assert box is not None
    assert words["x"] + words["width"] <= box["x"] + box["width"]


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


def test_the_navigation_names_every_page_and_cuts_no_name(open_page: OpenPage) -> None:
    page = open_page("/")
    navigation = page.get_by_test_id("stTopNav")
    links, rest = navigation.get_by_role("link"), navigation.get_by_role("button")
    for width in (1400, 800):
        page.set_viewport_size({"width": width, "height": 800})
        expect(page.get_by_test_id("stSidebar")).to_be_visible(timeout=30_000)
        expect(links).to_have_text(PAGES, timeout=30_000)
        expect(rest).to_have_count(0)
    # As beside a sidebar that was dragged wider.
    page.add_style_tag(content="[data-testid=stSidebar] { min-width: 380px }")
    page.wait_for_timeout(500)
    outer = navigation.bounding_box()
    inner = [item.bounding_box() for item in (links.first, links.last)]
    assert outer is not None
    for box in inner:
        assert box is not None
        assert outer["x"] <= box["x"]
        assert box["x"] + box["width"] <= outer["x"] + outer["width"]
