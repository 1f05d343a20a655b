"""The communication page in Chromium: no violation, and it fits; tests/app measures."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from playwright.sync_api import Browser, Page, expect

from tests.support.browser_page import settle, violations
from tests.support.collectives_results import DOCUMENT
from tests.support.server import Server, start_server, stop_server
from trainer.collectives.measurement import new_result_path, write_result

SECOND = 1_000


@pytest.fixture(scope="module")
def server(browser: Browser, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    server = start_server(tmp_path_factory.mktemp("server"), CUDA_VISIBLE_DEVICES="")
    yield server
    stop_server(server)


def shown(page: Page) -> None:
    heading = page.get_by_role("heading", name="Collectives")
    expect(heading).to_be_visible(timeout=60 * SECOND)


@pytest.mark.parametrize(("scheme", "width"), [("light", 1400), ("dark", 400)])
def test_it_has_no_violation_and_fits(
    browser: Browser, server: Server, scheme: Any, width: Any, tmp_path: Path
) -> None:
    write_result(new_result_path(server.runs, "nccl", 8), DOCUMENT)
    size = {"width": width, "height": 1000}
    context = browser.new_context(viewport=size, color_scheme=scheme)
    page = context.new_page()
    page.goto(f"{server.url}/hardware?tab=collectives")
    shown(page)
    expect(page.locator(".js-plotly-plot")).to_be_visible(timeout=60 * SECOND)
    settle(page)
    page.screenshot(path=tmp_path / "communication.png", full_page=True)
    assert violations(page) == []
    assert page.evaluate("document.documentElement.scrollWidth") <= width
    context.close()
