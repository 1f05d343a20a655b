"""The page Devices on a machine without a GPU: what is there, what is not, and why."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from playwright.sync_api import Browser, Page, expect

from tests.browser.conftest import ARTIFACTS, Server, start_server, stop_server
from tests.browser.test_axe import violations
from tests.browser.test_live_page import OpenPage, wait_until


@pytest.fixture(scope="module")
def server(browser: Browser, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """One server for all tests here, which change nothing; no GPU even on the simulator."""
    server = start_server(
        tmp_path_factory.mktemp("server"), CUDA_VISIBLE_DEVICES="", CUDASIM_NO_DRIVER="1"
    )
    yield server
    stop_server(server)


def polls(page: Page) -> int:
    return int(page.get_by_test_id("devices").get_attribute("data-polls") or 0)


def open_devices(page: Page, server: Server) -> None:
    page.goto(f"{server.url}/devices")
    expect(page.get_by_test_id("no-gpu")).to_be_visible(timeout=60_000)


@pytest.mark.parametrize("theme", ["light", "dark"])
def test_without_a_gpu_it_shows_the_machine_and_says_why_and_what_to_do(
    browser: Browser, server: Server, theme: str
) -> None:
    context = browser.new_context(
        viewport={"width": 1400, "height": 1000},
        color_scheme="light" if theme == "light" else "dark",
    )
    page = context.new_page()
    open_devices(page, server)
    expect(page.get_by_test_id("host")).to_contain_text("PyTorch")
    expect(page.get_by_test_id("no-gpu")).to_contain_text("driver")
    expect(page.get_by_test_id("no-gpu")).to_contain_text("stepscope doctor")
    expect(page.get_by_test_id("gpus").locator("article")).to_have_count(0)
    assert violations(page) == []
    ARTIFACTS.mkdir(exist_ok=True)
    page.screenshot(path=ARTIFACTS / f"devices-none-{theme}.png")
    context.close()


def test_it_is_kept_current_without_anything_being_drawn_anew(
    open_page: OpenPage, server: Server
) -> None:
    page = open_page("/devices", "404")  # Streamlit looks for two files below a deep link
    expect(page.get_by_test_id("host")).to_be_visible(timeout=60_000)
    page.evaluate("document.querySelector('[data-testid=host]').marked = true")
    seen = polls(page)
    wait_until(lambda: polls(page) > seen + 2, page, 20)
    assert page.evaluate("document.querySelector('[data-testid=host]').marked")
    assert page.evaluate("!document.querySelector('[data-stale=true]')")


def test_it_stands_between_memory_and_runs_and_one_comes_back_from_it(
    open_page: OpenPage,
) -> None:
    page = open_page()
    links = page.get_by_test_id("stHeader").get_by_role("link")
    expect(page.get_by_text("Nothing is running yet")).to_be_visible(timeout=60_000)
    names = [name.strip() for name in links.all_inner_texts() if name.strip()]
    assert names.index("Devices") == names.index("Runs") - 1
    links.filter(has_text="Devices").click()
    expect(page.get_by_test_id("host")).to_be_visible()
    links.filter(has_text="Live").click()
    expect(page.get_by_text("Nothing is running yet")).to_be_visible()
    expect(page.get_by_test_id("devices")).to_have_count(0)


@pytest.mark.parametrize("width", [400, 800])
def test_nothing_is_wider_than_a_phone(browser: Browser, server: Server, width: int) -> None:
    context = browser.new_context(viewport={"width": width, "height": 800})
    page = context.new_page()
    open_devices(page, server)
    assert page.evaluate("document.documentElement.scrollWidth") <= width
    wide = """nodes => nodes.filter(node => node.getBoundingClientRect().right > innerWidth)
        .map(node => node.outerHTML.slice(0, 120))"""
    assert page.locator("[data-testid=devices] *").evaluate_all(wide) == []
    context.close()
