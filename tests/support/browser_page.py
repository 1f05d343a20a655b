"""The page in Chromium: what it shows, what a person does on it."""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from axe_playwright_python.sync_playwright import Axe
from playwright.sync_api import Browser, Locator, Page, expect

from tests.support.server import Server

OpenPage = Callable[..., Page]
TRAINS_MS = 60_000
"""Longest time from Start to a training that runs."""


@contextmanager
def window(browser: Browser, width: int = 1400, scheme: Any = "light") -> Iterator[Page]:
    """Open a window; at its end its page is not wider, and has raised no error."""
    context = browser.new_context(viewport={"width": width, "height": 1000}, color_scheme=scheme)
    page = context.new_page()
    page.set_default_timeout(60_000)
    errors: list[str] = []
    page.on("pageerror", lambda error: errors.append(str(error)))
    yield page
    assert page.evaluate("document.documentElement.scrollWidth") <= width
    context.close()
    assert errors == []


def wide(page: Page, nodes: str, besides: str) -> list[str]:
    """Return nodes beyond the right edge of the window, except in boxes that scroll."""
    found: list[str] = page.locator(nodes).evaluate_all(
        """(nodes, box) => nodes.filter((node) => !node.closest(box) &&
            node.getBoundingClientRect().right > innerWidth + 1)
            .map((node) => node.outerHTML.slice(0, 160))""",
        besides,
    )
    return found


def button(page: Page, name: str) -> Locator:
    """Return the page's button: the header of Streamlit has a *Stop* too while a script runs."""
    found = page.get_by_role("button", name=name, exact=True)
    return found.and_(page.locator(":not([kind=header])"))


def start(page: Page, status: str = "Running") -> None:
    button(page, "Start run").click()
    expect(page.get_by_test_id("status")).to_contain_text(status, timeout=TRAINS_MS)


def open_tab(page: Page, name: str) -> None:
    """Open a tab of the run."""
    page.get_by_role("navigation", name="Views of the run").get_by_role(
        "button", name=name, exact=True
    ).click()


def points(page: Page, chart: str = "loss") -> int:
    return int(page.get_by_test_id(f"chart-{chart}").get_attribute("data-points") or 0)


def number(page: Page, kpi: str) -> float:
    text = page.get_by_test_id(f"kpi-{kpi}").inner_text()
    found = re.search(r"\n\s*([\d.,]+(e-?\d+)?)", text)
    assert found, f"no number in {text!r}"
    return float(found[1].replace(",", ""))


def step_of(page: Page) -> int:
    found = re.search(r"step ([\d,]+)", page.get_by_test_id("progress").inner_text())
    assert found
    return int(found[1].replace(",", ""))


def welcome(page: Page) -> Locator:
    """Return what the Run page shows in the place of a run."""
    return page.locator(".st-key-welcome_watch")


def wait_until(true: Callable[[], bool], page: Page, timeout_s: float = 60) -> None:
    deadline = time.monotonic() + timeout_s
    while not true():
        assert time.monotonic() < deadline, "timed out"
        page.wait_for_timeout(50)


def run_folder(server: Server) -> Path:
    (folder,) = [path for path in server.runs.iterdir() if (path / "run.json").exists()]
    return folder


def choose(page: Page, label: str, option: str) -> None:
    page.get_by_label(label, exact=True).first.click()
    page.get_by_role("option", name=option, exact=False).click()


def drag_zoom(page: Page, chart: str) -> None:
    plot = page.get_by_test_id(f"chart-{chart}").locator(".nsewdrag").first
    plot.scroll_into_view_if_needed()
    box = plot.bounding_box()
    assert box is not None
    y = box["y"] + box["height"] / 2
    page.mouse.move(box["x"] + box["width"] * 0.3, y)
    page.mouse.down()
    page.mouse.move(box["x"] + box["width"] * 0.6, y, steps=8)
    page.mouse.up()


def axis_range(page: Page, chart: str) -> list[float]:
    plot = page.get_by_test_id(f"chart-{chart}").locator(".js-plotly-plot").first
    found = plot.evaluate("div => div.layout.xaxis.range.map(Number)")
    return [round(float(value), 3) for value in found]


CONTRAST = ["color-contrast", "link-in-text-block"]
"""The rules of axe whose result depends on the theme."""


def violations(page: Page) -> list[str]:
    """Return what axe finds, a line for each element; in the dark theme by the rules of CONTRAST.

    The page is in the light theme before and afterwards.
    """
    found = _axe(page)
    bright = _background(page)
    page.emulate_media(color_scheme="dark")
    wait_until(lambda: _background(page) != bright, page)
    wait_for_animations(page)
    dark = _axe(page, CONTRAST)
    deadline = time.monotonic() + 10
    while dark and time.monotonic() < deadline:  # charts are drawn again, one in a frame
        page.wait_for_timeout(100)
        dark = _axe(page, CONTRAST)
    page.emulate_media(color_scheme="light")
    wait_until(lambda: _background(page) == bright, page)
    return [*found, *(f"dark: {line}" for line in dark)]


def _axe(page: Page, rules: Sequence[str] = ()) -> list[str]:
    """Return what axe finds by these rules, by default by all."""
    options = {"runOnly": {"type": "rule", "values": list(rules)}} if rules else None
    return [
        f"{rule['id']}: {node['target']} {node['html'][:200]} {node['failureSummary'][:300]}"
        for rule in Axe().run(page, options=options).response["violations"]
        for node in rule["nodes"]
    ]


def _background(page: Page) -> str:
    found = page.locator("[data-testid=stApp], body").last
    return str(found.evaluate("node => getComputedStyle(node).backgroundColor"))


def wait_for_animations(page: Page) -> None:
    """Wait until Streamlit has faded what goes, and buttons have their colors; spinners turn on."""
    page.wait_for_function(
        """document.getAnimations().every((one) => one.playState !== "running" ||
            one.effect.getComputedTiming().iterations === Infinity)"""
    )


def press(page: Page, target: Locator, key: str = "Enter", most: int = 80) -> None:
    """Walk to an element by Tab alone and press a key on it."""
    for _ in range(most):
        page.keyboard.press("Tab")
        if target.evaluate("node => node === document.activeElement"):
            page.keyboard.press(key)
            return
    pytest.fail(f"not reached by {most} tabs")


def settle(page: Page) -> None:
    """Leave the button, whose help lies outside of all landmarks; wait until the page is drawn."""
    page.mouse.move(page.evaluate("innerWidth") / 2, 5)
    expect(page.get_by_role("tooltip")).to_have_count(0)
    app = page.get_by_test_id("stApp")
    expect(app).to_have_attribute("data-test-script-state", "notRunning")
    expect(page.locator("[data-stale=true]")).to_have_count(0)
    wait_for_animations(page)
