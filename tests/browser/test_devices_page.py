"""The Hardware page in Chromium, without a GPU."""

from __future__ import annotations

from playwright.sync_api import expect

from tests.support.browser_page import OpenPage, welcome


def test_it_is_left_by_the_navigation(open_page: OpenPage) -> None:
    page = open_page()
    links = page.get_by_test_id("stHeader").get_by_role("link")
    expect(welcome(page)).to_be_visible()
    links.filter(has_text="Hardware").click()
    expect(page.get_by_text("No GPU found")).to_be_visible()
    links.get_by_text("Run", exact=True).click()
    expect(welcome(page)).to_be_visible()
    expect(page.get_by_text("No GPU found")).to_have_count(0)
