"""The Memory tab on a CPU."""

from __future__ import annotations

from playwright.sync_api import expect

from tests.support.browser_page import (
    OpenPage,
    button,
    open_tab,
    run_folder,
    start,
    violations,
    wait_until,
)
from tests.support.memory_page import PLOT, areas, open_memory, table
from tests.support.server import Server

LONG = "/?epochs=5000&num_workers=1"


def test_the_breakdown_of_a_cpu_run_live_and_afterwards(
    open_page: OpenPage, server: Server
) -> None:
    page = open_page(LONG)
    start(page)
    open_memory(page)
    # The rows that exist for a reader of the screen follow the drawn ones a moment later.
    wait_until(lambda: {"parameters", "total"} <= set(table(page)), page)
    found = table(page)
    sums = {"this process"} & set(found)
    parts = sum(size for name, size in found.items() if name not in {"total", *sums})
    assert abs(parts - found["total"]) <= 0.01 * parts
    wait_until(lambda: set(areas(page)) < set(table(page)), page)
    assert violations(page) == []
    open_tab(page, "Overview")
    button(page, "Stop").click()
    expect(page.get_by_test_id("status")).to_contain_text("Stopped")
    open_memory(page)
    wait_until(lambda: table(page).get("total", 0) > 0, page)
    assert run_folder(server).name in page.url


def test_a_zoom_stays_while_live_is_off(open_page: OpenPage) -> None:
    page = open_page(LONG)
    start(page)
    open_memory(page)
    page.get_by_text("Live", exact=True).click()
    expect(page.get_by_role("switch", name="Live")).not_to_be_checked()
    page.wait_for_timeout(1_000)
    plot = page.locator(PLOT).last
    before = plot.evaluate("node => node.layout.xaxis.range")
    plot.scroll_into_view_if_needed()
    box = plot.bounding_box()
    assert box is not None
    page.mouse.move(box["x"] + 0.3 * box["width"], box["y"] + 150)
    page.mouse.down()
    page.mouse.move(box["x"] + 0.5 * box["width"], box["y"] + 150, steps=5)
    page.mouse.up()
    wait_until(lambda: plot.evaluate("node => node.layout.xaxis.range") != before, page)
    zoomed = plot.evaluate("node => node.layout.xaxis.range")
    page.wait_for_timeout(6_000)
    assert plot.evaluate("node => node.layout.xaxis.range") == zoomed
