"""The Memory tab in Chromium."""

from __future__ import annotations

from playwright.sync_api import Page, expect

from tests.support.browser_page import open_tab

UNITS = {"B": 1, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30, "TiB": 2**40}


def bytes_of(text: str) -> float:
    """The bytes of a text such as "1.20 GiB", as exact as it is."""
    number, unit = text.split()
    return float(number.replace(",", "")) * UNITS[unit]


def table(page: Page, column: int = 0) -> dict[str, float]:
    """The lines of the ledger's table by their keys, in bytes; sums and the total are in it."""
    rows = page.get_by_test_id("ledger-table").locator("tbody tr")
    found: list[tuple[str, str]] = rows.evaluate_all(
        "(rows, column) => rows.map((row) => [row.dataset.part,"
        " row.cells[1 + column].firstChild.textContent])",
        column,
    )
    return {key: bytes_of(text) for key, text in found if text != "n/a"}


def sums_up(lines: dict[str, float]) -> bool:
    """Whether the parts sum to the total, as far as three digits tell."""
    parts = [
        size for key, size in lines.items() if key.startswith("ledger/") and "total" not in key
    ]
    return abs(sum(parts) - lines["ledger/total"]) <= 0.005 * sum(parts) + 1


def areas(page: Page, chart: str) -> dict[str, str]:
    """The parts of a stack from the bottom to its top, with their colors."""
    plot = page.get_by_test_id(f"chart-{chart}").locator(".js-plotly-plot")
    found: dict[str, str] = plot.evaluate(
        "node => Object.fromEntries(node.data.filter((line) => line.stackgroup)"
        ".map((line) => [line.name, line.fillcolor]))"
    )
    return found


def open_memory(page: Page) -> None:
    open_tab(page, "Memory")
    expect(page.get_by_test_id("ledger-table")).to_be_visible(timeout=60_000)
    expect(page.get_by_test_id("stepscope-ledger")).to_have_attribute(
        "data-ready", "1", timeout=60_000
    )
