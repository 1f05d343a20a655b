"""The Runs page in a browser: search, choose a column, tag, rename, pin, delete, open."""

from __future__ import annotations

import re
from collections.abc import Callable

from playwright.sync_api import Locator, Page, expect

from stepscope.run import read_metadata, read_run
from tests.support.app_page import record
from tests.support.server import Server
from tests.support.waiting import wait_until


def tick(page: Page, row: int) -> None:
    """Tick a row: the table is a canvas, with a column of ticks at its left."""
    table = page.get_by_test_id("stDataFrame").first
    table.scroll_into_view_if_needed()
    table.click(position={"x": 15, "y": 35 + 35 * row + 17})


def rows(page: Page) -> Locator:
    """Return the rows of the table, which its canvas has for screen readers."""
    return page.get_by_test_id("stDataFrame").first.locator("canvas tbody tr")


def test_a_run_is_found_edited_and_deleted(server: Server, open_page: Callable[..., Page]) -> None:
    gone = {"pid": 2**22 + 1}
    server.runs.mkdir(exist_ok=True)
    for name, lr in (("one", 0.5), ("two", 0.1), ("three", 0.1)):
        record(server.runs, name, config={"lr": lr}, **gone)
    page = open_page("/runs", expected="404")  # Streamlit looks for its files below /runs first
    expect(rows(page)).to_have_count(3)
    search = page.get_by_label("Search", exact=True)
    search.fill("lr>0.2")
    search.press("Enter")
    expect(rows(page)).to_have_count(1)
    page.get_by_test_id("stPopoverButton").filter(has_text="Columns").click()
    page.get_by_role("combobox", name="Columns", exact=True).fill("config: lr")
    page.get_by_role("combobox", name="Columns", exact=True).press("Enter")
    page.keyboard.press("Escape")
    wait_until(lambda: "config" in page.url)
    tick(page, 0)
    page.get_by_test_id("stPopoverButton").filter(has_text="Edit").click()
    page.get_by_label("Name", exact=True).fill("best")
    tags = page.get_by_role("combobox", name="Tags", exact=True)
    tags.fill("kept")
    tags.press("Enter")
    page.get_by_text("Pin", exact=True).click()
    page.get_by_role("button", name="Save").click()
    folder = server.runs / "one"
    wait_until(lambda: read_metadata(read_run(folder)).pinned)
    found = read_metadata(read_run(folder))
    assert (found.name, found.tags) == ("best", ("kept",))
    search.fill("")
    search.press("Enter")
    expect(rows(page)).to_have_count(3)
    tick(page, 1)
    page.get_by_test_id("stPopoverButton").filter(has_text="Delete").click()
    page.get_by_role("button", name=re.compile("^Delete .*run")).click()
    expect(rows(page)).to_have_count(2)
    assert folder.exists()
    assert not (server.runs / "three").exists()
