"""The Memory tab on a CPU."""

from __future__ import annotations

import re

import pytest
from playwright.sync_api import Browser, Page, expect

from tests.support.browser_page import (
    OpenPage,
    button,
    open_tab,
    run_folder,
    start,
    violations,
    wait_until,
    wide,
    window,
)
from tests.support.memory_page import areas, open_memory, sums_up, table
from tests.support.server import Server

LONG = "/?epochs=5000&num_workers=1"


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_the_breakdown_of_a_cpu_run_live_and_afterwards(
    browser: Browser, server: Server, scheme: str
) -> None:
    with window(browser, scheme=scheme) as page:
        watch(page, server, scheme)


def watch(page: Page, server: Server, theme: str) -> None:
    page.goto(f"{server.url}{LONG}")
    start(page)
    open_memory(page)
    wait_until(lambda: "ledger/parameters" in table(page) and sums_up(table(page)), page, 60)
    ledger = page.get_by_test_id("stepscope-ledger")
    first = int(ledger.get_attribute("data-polls") or "0")
    wait_until(lambda: int(ledger.get_attribute("data-polls") or "0") > first + 1, page)
    lines = table(page)
    assert sums_up(lines)
    # Table and area have the same parts, order and colors; the table begins at the top.
    parts = [key for key in lines if key.startswith("ledger/") and key != "ledger/total"]
    labels = page.get_by_test_id("ledger-table").locator("tbody tr[data-part^='ledger/'] button")
    names = [text.strip() for text in labels.all_inner_texts()]
    assert len(names) == len(parts)
    drawn = areas(page, "ledger")
    # The whole process takes the place of its parts until tensors are read the first time.
    drawn.pop("this process", None)
    assert list(drawn)[::-1] == names
    swatches = labels.locator("i").evaluate_all(
        "nodes => nodes.map((node) => getComputedStyle(node).backgroundColor)"
    )
    plain = [
        f"rgb({', '.join(str(int(c[i : i + 2], 16)) for i in (1, 3, 5))})" for c in drawn.values()
    ]
    assert swatches == plain[::-1]
    assert violations(page) == []

    button(page, "available").click()  # a row of the table: removes the part from the stack
    wait_until(lambda: "available" not in areas(page, "ledger"), page)
    button(page, "available").click()
    wait_until(lambda: "available" in areas(page, "ledger"), page)

    open_tab(page, "Overview")
    button(page, "Stop").click()
    expect(page.get_by_test_id("status")).to_contain_text("Stopped")
    open_memory(page)
    expect(page.get_by_test_id("ledger-table")).to_contain_text("At the end")
    assert sums_up(table(page))
    assert run_folder(server).name in page.url


@pytest.mark.parametrize(("width", "scheme"), [(400, "dark"), (800, "light")])
def test_a_narrow_stack_can_be_read_and_zoomed(
    browser: Browser, server: Server, width: int, scheme: str
) -> None:
    with window(browser, width, scheme) as page:
        page.goto(f"{server.url}/?run=cpu-training&tab=memory")
        heading = page.get_by_test_id("ledger-table").locator("thead")
        expect(heading).to_contain_text("At the end")
        wait_until(lambda: len(areas(page, "ledger")) > 1, page, 30)
        assert wide(page, "[data-testid=stepscope-ledger] *", ".ss-scroll") == []

        stage = page.get_by_test_id("chart-ledger").locator(".ss-stage")
        stage.scroll_into_view_if_needed()
        box = stage.bounding_box()
        assert box is not None
        page.mouse.move(box["x"] + 0.5 * box["width"], box["y"] + 150)
        expect(heading).to_contain_text(re.compile(r"At \d+:\d\d"))
        assert sums_up(table(page))
        page.mouse.down()
        page.mouse.move(box["x"] + 0.7 * box["width"], box["y"] + 150, steps=5)
        page.mouse.up()
        ledger = page.get_by_test_id("stepscope-ledger")
        back = ledger.get_by_test_id("back-to-live")
        expect(back).to_be_visible()
        low, high = map(float, (ledger.get_attribute("data-zoom") or "").split(","))
        assert 0 < low < high
        back.click()
        expect(back).to_be_hidden()


def test_a_run_that_begins_appears_on_the_empty_page(open_page: OpenPage) -> None:
    page = open_page("/memory", "404")  # the old address; Streamlit looks for files below it
    expect(page.get_by_text("No run is shown")).to_be_visible()
    other = open_page(LONG)
    start(other)
    expect(page.get_by_test_id("ledger-table")).to_be_visible()
    button(other, "Stop").click()
    expect(other.get_by_test_id("status")).to_contain_text("Stopped")
