"""The Hardware page in Chromium, without a GPU."""

from __future__ import annotations

import pytest
from playwright.sync_api import Browser, expect

from tests.support.browser_page import OpenPage, violations, welcome, window
from tests.support.server import Server


@pytest.mark.parametrize("width", [1400, 400])
def test_without_a_gpu_it_shows_the_machine_with_a_reason_and_a_fix(
    browser: Browser, server: Server, width: int
) -> None:
    with window(browser, width) as page:
        page.goto(f"{server.url}/hardware")
        expect(page.get_by_text("PyTorch")).to_be_visible()
        expect(page.get_by_test_id("stAlert")).to_contain_text("driver")
        expect(page.get_by_test_id("stDataFrame")).to_have_count(0)
        assert violations(page) == []


def test_it_is_left_by_the_navigation(open_page: OpenPage) -> None:
    page = open_page()
    links = page.get_by_test_id("stHeader").get_by_role("link")
    expect(welcome(page)).to_be_visible()
    links.filter(has_text="Hardware").click()
    expect(page.get_by_text("No GPU found")).to_be_visible()
    links.get_by_text("Run", exact=True).click()
    expect(welcome(page)).to_be_visible()
    expect(page.get_by_text("No GPU found")).to_have_count(0)
