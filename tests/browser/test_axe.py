"""axe-core finds nothing on any page, in both themes and several states; nothing is too wide."""

from __future__ import annotations

import shutil

import pytest
from playwright.sync_api import Browser, Page, expect

from tests.support.browser_page import (
    OpenPage,
    button,
    open_tab,
    settle,
    start,
    violations,
    wide,
    window,
)
from tests.support.collectives_results import DOCUMENT
from tests.support.server import ROOT, Server
from trainer.collectives.measurement import new_result_path, write_result

EXAMPLES = ("cpu-training", "two-simulated-gpus")  # finished with look-only buttons, and failed
COLLECTIVES = "/hardware?tab=collectives"


def show(page: Page, server: Server, run: str) -> None:
    page.goto(f"{server.url}/?run={run}")
    expect(page.get_by_test_id("stepscope-live")).to_have_attribute("data-ready", "1")


def unfold_all(page: Page) -> None:
    for summary in page.locator("summary").all():
        if summary.evaluate("node => !node.parentElement.open"):
            summary.click()


@pytest.mark.timeout(300)
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_no_page_has_a_violation(browser: Browser, server: Server, scheme: str) -> None:
    write_result(new_result_path(server.runs, "nccl", 8), DOCUMENT)
    with window(browser, scheme=scheme) as page:
        page.goto(server.url)
        expect(page.get_by_text("No run is shown", exact=True)).to_be_visible()
        assert violations(page) == []
        shutil.copytree(ROOT / "examples" / "cpu-training", server.runs / "one")
        for run in EXAMPLES:
            show(page, server, run)
            unfold_all(page)
            assert violations(page) == []
            for tab in ("Memory", "Profile", "Logs", "Details"):
                open_tab(page, tab)
                page.wait_for_timeout(1_000)
                assert violations(page) == [], tab
        for path, content in (("/runs", "stDataFrame"), (COLLECTIVES, "stPlotlyChart")):
            page.goto(server.url + path)
            expect(page.get_by_test_id(content).first).to_be_visible()
            settle(page)
            assert violations(page) == [], path
        page.goto(f"{server.url}/?epochs=5000")
        start(page)
        expect(page.get_by_test_id("chart-loss")).to_be_visible()
        # Streamlit fades what is about to go.
        expect(page.get_by_text("No run is shown", exact=True)).to_have_count(0)
        settle(page)
        assert violations(page) == []
        button(page, "Stop").click()
        expect(page.get_by_test_id("status")).to_contain_text("Stopped")


def test_an_example_opens_by_one_click_and_then_by_its_address(
    open_page: OpenPage, server: Server
) -> None:
    page = open_page()
    page.get_by_role("button", name="Example: digits on a CPU").click(timeout=60_000)
    expect(page.get_by_test_id("status")).to_contain_text("Finished")
    expect(page.get_by_text("Recorded on a CPU").first).to_be_visible()
    other = open_page(page.url.removeprefix(server.url))
    expect(other.get_by_test_id("status")).to_contain_text("Finished")
    expect(button(other, "Start run")).to_be_enabled()
    assert not any(server.runs.glob("*/run.json"))


@pytest.mark.parametrize("width", [400, 800])
def test_a_phone_starts_with_the_sidebar_closed_and_nothing_is_wider_than_it(
    browser: Browser, server: Server, width: int
) -> None:
    with window(browser, width) as page:
        show(page, server, EXAMPLES[1])
        expect(page.get_by_test_id("status")).to_contain_text("Failed")
        content = page.get_by_test_id("status").locator(".ss-badge").bounding_box()
        assert content is not None
        sidebar = page.get_by_test_id("stSidebar")
        edge = sidebar.bounding_box() if sidebar.count() else None
        right = 0.0 if edge is None else edge["x"] + edge["width"]
        assert right <= (0 if width < 800 else content["x"])
        assert wide(page, "[data-testid=stepscope-live] *, .stMain button", ".ss-scroll") == []
        write_result(new_result_path(server.runs, "nccl", 8), DOCUMENT)
        page.goto(server.url + COLLECTIVES)
        expect(page.get_by_test_id("stPlotlyChart").first).to_be_visible()
