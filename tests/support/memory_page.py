"""The Memory tab in Chromium."""

from __future__ import annotations

from playwright.sync_api import Page, expect

from tests.support.browser_page import open_tab

PLOT = ".st-key-breakdown .js-plotly-plot"
"""While Streamlit draws it again, the former one may still be there, before the new one."""
UNITS = {"B": 1, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30, "TiB": 2**40}


def bytes_of(text: str) -> float:
    """The bytes of a text such as "1.20 GiB", as exact as it is."""
    number, unit = text.split()
    return float(number.replace(",", "")) * UNITS[unit]


def table(page: Page) -> dict[str, float]:
    """Return the present bytes of each category, sums and the total included."""
    rows = page.get_by_test_id("stDataFrame").first.locator("canvas tbody tr")
    found: list[tuple[str, str]] = rows.evaluate_all(
        "(rows) => rows.map((row) => [row.cells[0].textContent, row.cells[1].textContent])"
    )
    return {name.strip(): bytes_of(text) for name, text in found}


def areas(page: Page) -> list[str]:
    """Return the categories of the stack from the bottom to its top."""
    found: list[str] = page.locator(PLOT).last.evaluate(
        "node => node.data.map((area) => area.name)"
    )
    return found


def open_memory(page: Page) -> None:
    open_tab(page, "Memory")
    chart = page.locator(PLOT).last
    expect(chart).to_be_visible(timeout=60_000)
    expect(page.get_by_test_id("stDataFrame").first).to_be_visible()
