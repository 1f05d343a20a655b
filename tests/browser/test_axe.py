"""axe-core finds nothing on any page, in both themes and several states; all works by keyboard."""

from __future__ import annotations

import re
import shutil
from collections.abc import Iterator

import pytest
from playwright.sync_api import Browser, Page, expect

from stepscope.run import RunStatus, read_run, run_folders
from tests.support.browser_page import OpenPage, button, open_tab, press, violations
from tests.support.server import ROOT, Server, start_server, stop_server

LONG = "/?epochs=5000"


@pytest.fixture(scope="module")
def server(browser: Browser, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """One server for all tests here, with two recorded runs; a test stops what it starts."""
    folder = tmp_path_factory.mktemp("server")
    for name in ("one", "two"):
        shutil.copytree(ROOT / "examples" / "cpu-training", folder / "runs" / name)
    server = start_server(folder, CUDA_VISIBLE_DEVICES="")
    yield server
    stop_server(server)


@pytest.fixture(params=["light", "dark"])
def themed(request: pytest.FixtureRequest, browser: Browser) -> Iterator[Page]:
    """A tab of a browser that asks for this theme."""
    scheme = request.param
    context = browser.new_context(viewport={"width": 1400, "height": 1000}, color_scheme=scheme)
    page = context.new_page()
    page.set_default_timeout(30_000)
    yield page
    context.close()


def show(page: Page, server: Server, run: str) -> None:
    page.goto(f"{server.url}/?run={run}")
    expect(page.get_by_test_id("stepscope-live")).to_have_attribute(
        "data-ready", "1", timeout=60_000
    )


def unfold_all(page: Page) -> None:
    for summary in page.locator("summary").all():
        if summary.evaluate("node => !node.parentElement.open"):
            summary.click()


def test_no_page_has_a_violation(themed: Page, server: Server) -> None:
    page = themed
    page.goto(server.url)
    page.get_by_role("combobox", name="Run", exact=True).select_option("")
    expect(page.get_by_text("No run is shown", exact=True)).to_be_visible(timeout=60_000)
    assert violations(page) == []
    for run in ("one", "two-simulated-gpus"):  # finished with look-only buttons, and failed
        show(page, server, run)
        unfold_all(page)
        assert violations(page) == []
        for tab in ("Memory", "Profile", "Logs", "Details"):
            open_tab(page, tab)
            page.wait_for_timeout(1_000)
            assert violations(page) == [], tab
    page.get_by_test_id("stHeader").get_by_role("link", name="Runs").click()
    expect(page.get_by_test_id("stDataFrame")).to_be_visible(timeout=60_000)
    assert violations(page) == []


def test_a_running_page_has_no_violation(themed: Page, server: Server) -> None:
    page = themed
    page.goto(f"{server.url}{LONG}")
    button(page, "Start run").click()
    expect(page.get_by_test_id("status")).to_contain_text("Running", timeout=60_000)
    expect(page.get_by_test_id("chart-loss")).to_be_visible()
    # Streamlit fades what is about to go.
    expect(page.get_by_text("No run is shown", exact=True)).to_have_count(0)
    page.mouse.move(700, 500)  # away from the button, whose tooltip lies outside of all landmarks
    expect(page.get_by_role("tooltip")).to_have_count(0)
    found = violations(page)
    button(page, "Stop").click()
    expect(page.get_by_test_id("status")).to_contain_text("Stopped")
    assert found == []


def test_start_pause_and_stop_by_keyboard(open_page: OpenPage, server: Server) -> None:
    page = open_page(LONG)
    expect(button(page, "Start run")).to_be_enabled(timeout=60_000)
    press(page, button(page, "Start run"))
    status = page.get_by_test_id("status")
    expect(status).to_contain_text("Running", timeout=60_000)
    press(page, button(page, "Pause"))
    expect(status).to_contain_text("Paused")
    press(page, button(page, "Stop"))
    expect(status).to_contain_text("Stopped")
    assert read_run(max(server.runs.glob("2*"))).status is RunStatus.STOPPED


def test_an_example_opens_by_one_click_and_then_by_its_address(
    open_page: OpenPage, server: Server
) -> None:
    before = set(server.runs.iterdir())
    page = open_page()
    expect(page.get_by_test_id("status")).to_be_visible(timeout=60_000)  # the newest run
    page.get_by_role("combobox", name="Run", exact=True).select_option("")
    page.get_by_role("button", name="Example: digits on a CPU").click()
    expect(page.get_by_test_id("status")).to_contain_text("Finished")
    expect(page.get_by_text("Recorded on a CPU").first).to_be_visible()
    other = open_page(page.url.removeprefix(server.url))
    expect(other.get_by_test_id("status")).to_contain_text("Finished")
    expect(button(other, "Start run")).to_be_enabled()
    assert set(server.runs.iterdir()) == before


def test_a_row_of_the_runs_page_opens_its_run(open_page: OpenPage, server: Server) -> None:
    page = open_page()
    page.get_by_test_id("stHeader").get_by_role("link", name="Runs").click()
    table = page.get_by_test_id("stDataFrame")
    expect(table).to_be_visible(timeout=60_000)
    page.wait_for_timeout(500)  # the canvas answers once it is drawn
    newest = max(map(read_run, run_folders(server.runs)), key=lambda run: run.created)
    table.click(position={"x": 16, "y": 50})  # the row's tick
    page.get_by_role("button", name=re.compile("^Open ")).click()
    expect(page.get_by_test_id("status")).to_contain_text(newest.status.capitalize())
    assert f"run={newest.id}" in page.url


@pytest.mark.parametrize("width", [400, 800])
def test_a_phone_starts_with_the_sidebar_closed_and_nothing_is_wider_than_it(
    browser: Browser, server: Server, width: int
) -> None:
    context = browser.new_context(viewport={"width": width, "height": 800})
    page = context.new_page()
    show(page, server, "two-simulated-gpus")
    expect(page.get_by_test_id("status")).to_contain_text("Failed")
    content = page.locator(".ss-badge").bounding_box()
    assert content is not None
    sidebar = page.get_by_test_id("stSidebar")
    edge = sidebar.bounding_box() if sidebar.count() else None
    right = 0.0 if edge is None else edge["x"] + edge["width"]
    assert right <= (0 if width < 800 else content["x"])
    assert page.evaluate("document.documentElement.scrollWidth") <= width
    # What lies in a box that scrolls by itself may be wider.
    wide = """nodes => nodes.filter(node => node.getBoundingClientRect().right > innerWidth
            && !node.closest(".ss-scroll"))
        .map(node => node.outerHTML.slice(0, 120))"""
    shown = page.locator("[data-testid=stepscope-live] *, .stMain button")
    assert shown.evaluate_all(wide) == []
    context.close()


def test_content_begins_within_120_px(open_page: OpenPage) -> None:
    page = open_page()
    status = page.get_by_test_id("status").locator(".ss-badge")
    expect(status).to_be_visible(timeout=60_000)
    box = status.bounding_box()
    assert box is not None
    assert box["y"] < 120
