"""The page Memory and the switch of the Live page's memory chart, on a CPU."""

from __future__ import annotations

import re
from collections.abc import Iterator

import pytest
from playwright.sync_api import Browser, Locator, Page, expect

from tests.support.browser_page import button, open_tab, run_folder, start, violations, wait_until
from tests.support.memory_page import areas, open_memory, sums_up, table
from tests.support.server import ARTIFACTS, Server

LONG = "/?epochs=5000&num_workers=1"


def ledger(page: Page) -> Locator:
    return page.get_by_test_id("stepscope-ledger")


def keep(page: Page, name: str) -> None:
    ARTIFACTS.mkdir(exist_ok=True)
    page.screenshot(path=ARTIFACTS / f"memory-{name}.png", full_page=True)


@pytest.fixture(params=["light", "dark"])
def themed(request: pytest.FixtureRequest, browser: Browser) -> Iterator[tuple[Page, str]]:
    """A tab of a browser that asks for this theme; it may not write errors to its console."""
    context = browser.new_context(
        viewport={"width": 1400, "height": 1000}, color_scheme=request.param
    )
    page = context.new_page()
    page.set_default_timeout(30_000)
    errors: list[str] = []
    page.on("pageerror", lambda error: errors.append(str(error)))
    yield page, request.param
    context.close()
    assert errors == []


def test_a_cpu_runs_memory_is_told_apart_live_and_afterwards(
    themed: tuple[Page, str], server: Server
) -> None:
    page, theme = themed
    page.goto(f"{server.url}{LONG}")
    start(page)
    chart = page.get_by_test_id("chart-memory")
    wait_until(lambda: chart.locator(".js-plotly-plot").count() == 1, page, 30)
    assert areas(page, "memory") == {}
    button(page, "Breakdown").click()
    wait_until(lambda: len(areas(page, "memory")) > 1, page, 30)
    expect(chart).to_contain_text("available")
    keep(page, f"live-{theme}")

    open_memory(page)
    wait_until(lambda: "ledger/parameters" in table(page) and sums_up(table(page)), page, 60)
    first = page.get_by_test_id("stepscope-ledger").get_attribute("data-polls") or "0"
    ledger = page.get_by_test_id("stepscope-ledger")
    wait_until(lambda: int(ledger.get_attribute("data-polls") or "0") > int(first) + 1, page)
    lines = table(page)
    assert sums_up(lines)
    # Table and area have the same parts, order and colors; the table begins at the top.
    parts = [key for key in lines if key.startswith("ledger/") and key != "ledger/total"]
    labels = page.get_by_test_id("ledger-table").locator("tbody tr[data-part^='ledger/'] button")
    names = [text.strip() for text in labels.all_inner_texts()]
    assert len(names) == len(parts)
    drawn = areas(page, "ledger")
    # It stands in the place of its parts until the first reading of what tensors take.
    drawn.pop("this process", None)
    assert list(drawn)[::-1] == names
    swatches = labels.locator("i").evaluate_all(
        "nodes => nodes.map((node) => getComputedStyle(node).backgroundColor)"
    )
    plain = [
        f"rgb({', '.join(str(int(c[i : i + 2], 16)) for i in (1, 3, 5))})" for c in drawn.values()
    ]
    assert swatches == plain[::-1]
    keep(page, theme)
    assert violations(page) == []

    button(page, "available").click()  # a line of the table: the part leaves the stack
    wait_until(lambda: "available" not in areas(page, "ledger"), page)
    button(page, "full scale").click()
    wait_until(lambda: "available" in areas(page, "ledger"), page)

    open_tab(page, "Overview")
    button(page, "Stop").click()
    expect(page.get_by_test_id("status")).to_contain_text("Stopped", timeout=60_000)
    wait_until(lambda: len(areas(page, "memory")) > 1, page, 30)  # the choice is kept
    open_memory(page)
    expect(page.get_by_test_id("ledger-table")).to_contain_text("At the end")
    assert sums_up(table(page))
    assert run_folder(server).name in page.url


def test_hover_and_zoom_work_on_the_stack(themed: tuple[Page, str], server: Server) -> None:
    page, theme = themed
    page.goto(f"{server.url}/?run=cpu-training&tab=memory")
    expect(page.get_by_test_id("ledger-table")).to_contain_text("At the end", timeout=60_000)
    stage = page.get_by_test_id("chart-ledger").locator(".ss-stage")
    wait_until(lambda: len(areas(page, "ledger")) > 1, page, 30)
    box = stage.bounding_box()
    assert box is not None
    page.mouse.move(box["x"] + 0.5 * box["width"], box["y"] + 150)
    heading = page.get_by_test_id("ledger-table").locator("thead")
    expect(heading).to_contain_text(re.compile(r"At \d+:\d\d"))
    assert sums_up(table(page))
    page.mouse.down()
    page.mouse.move(box["x"] + 0.7 * box["width"], box["y"] + 150, steps=5)
    page.mouse.up()
    expect(ledger(page).get_by_test_id("back-to-live")).to_be_visible()
    zoomed = page.get_by_test_id("stepscope-ledger").get_attribute("data-zoom")
    assert zoomed
    low, high = map(float, zoomed.split(","))
    assert 0 < low < high
    page.wait_for_timeout(500)  # the zoom's finer moments
    keep(page, f"zoom-{theme}")
    ledger(page).get_by_test_id("back-to-live").click()
    expect(ledger(page).get_by_test_id("back-to-live")).to_be_hidden()


@pytest.mark.parametrize("width", [400, 800])
def test_a_narrow_page_is_not_wider_than_its_window(
    browser: Browser, server: Server, width: int
) -> None:
    context = browser.new_context(viewport={"width": width, "height": 900})
    page = context.new_page()
    page.goto(f"{server.url}/?run=two-simulated-gpus&tab=memory")
    expect(page.get_by_test_id("ledger-table")).to_be_visible(timeout=60_000)
    wait_until(lambda: len(areas(page, "ledger")) > 1, page, 30)
    assert page.evaluate("document.documentElement.scrollWidth") <= width
    wide = "nodes => nodes.filter((node) => node.getBoundingClientRect().right > innerWidth).length"
    assert page.locator("[data-testid=stepscope-ledger] *").evaluate_all(wide) == 0
    keep(page, f"{width}")
    context.close()


def test_a_run_that_begins_appears_on_the_empty_page(browser: Browser, server: Server) -> None:
    context = browser.new_context(viewport={"width": 1400, "height": 1000})
    page = context.new_page()
    page.goto(f"{server.url}/memory")  # its address of before
    expect(page.get_by_text("No run is shown")).to_be_visible(timeout=60_000)
    keep(page, "empty")
    other = context.new_page()
    other.goto(f"{server.url}{LONG}")
    start(other)
    expect(page.get_by_test_id("ledger-table")).to_be_visible(timeout=60_000)
    button(other, "Stop").click()
    expect(other.get_by_test_id("status")).to_contain_text("Stopped", timeout=60_000)
    context.close()
