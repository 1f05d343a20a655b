"""The Memory tab on a CPU."""

from __future__ import annotations

import re

from playwright.sync_api import Browser, expect

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


def test_the_breakdown_of_a_cpu_run_live_and_afterwards(
    open_page: OpenPage, server: Server
) -> None:
    page = open_page(LONG)
    start(page)
    open_memory(page)
    wait_until(lambda: "ledger/parameters" in table(page) and sums_up(table(page)), page)
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
    wait_until(lambda: sums_up(table(page)), page)
    assert run_folder(server).name in page.url


def test_a_narrow_stack_can_be_read_and_zoomed(browser: Browser, server: Server) -> None:
    with window(browser, 400) as page:
        page.goto(f"{server.url}/?run=cpu-training&tab=memory")
        heading = page.get_by_test_id("ledger-table").locator("thead")
        expect(heading).to_be_visible()
        wait_until(lambda: len(areas(page, "ledger")) > 1, page)
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
