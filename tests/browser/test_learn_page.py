"""The learn page in Chromium: lessons run from their pages as a person runs them."""

from __future__ import annotations

import pytest
from playwright.sync_api import Page, expect

from tests.support.browser_page import OpenPage, button, wait_until
from trainer.lessons import BY_NAME, LESSONS, Lesson

MISSING = "404"
"""In the console: Streamlit asks for its own addresses below /learn first."""


def shown(page: Page, lesson: Lesson) -> None:
    expect(page.get_by_role("heading", name=lesson.title)).to_be_visible()


@pytest.mark.parametrize("name", ["seeds", "all_reduce", "streams"])  # alone, two ranks, CUDA
def test_a_lesson_runs_from_its_page(open_page: OpenPage, name: str) -> None:
    """Each lesson's program runs in tests/integration/test_lesson_run.py."""
    lesson = BY_NAME[name]
    page = open_page(f"/learn?lesson={lesson.name}", expected=MISSING)
    shown(page, lesson)
    last = lesson.path.read_text().strip().splitlines()[-1].strip()
    program = page.locator(".stCode").last
    expect(program).to_contain_text(last)
    if lesson.needs_cuda:
        expect(button(page, "Run")).to_be_disabled()
        expect(page.get_by_role("status")).to_contain_text(lesson.needs_cuda)
        return
    button(page, "Run").click()
    expect(page.locator(".stCode")).to_have_count(2, timeout=300_000)
    assert len(page.locator(".stCode").first.inner_text().splitlines()) >= 4
    expect(button(page, "Run")).to_be_enabled()


def test_from_lesson_to_lesson_by_links_and_back(open_page: OpenPage) -> None:
    page = open_page("/", expected=MISSING)  # at the reload
    page.get_by_test_id("stHeader").get_by_role("link", name="Learn").click()
    shown(page, LESSONS[0])
    page.get_by_test_id("stSidebar").get_by_role("link", name=BY_NAME["amp"].title).click()
    shown(page, BY_NAME["amp"])
    wait_until(lambda: page.url.endswith("/learn?lesson=amp"), page)
    page.go_back()
    shown(page, LESSONS[0])
    page.go_forward()
    shown(page, BY_NAME["amp"])
    page.reload()
    shown(page, BY_NAME["amp"])
    marked = page.get_by_test_id("stSidebar").locator(".st-key-lesson_here")
    expect(marked).to_have_text(BY_NAME["amp"].title)
