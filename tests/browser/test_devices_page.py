"""The Hardware page without a GPU, and with made-up answers of a machine with many GPUs.

The made-up answers are those of the server for the GPUs of tests/support/fake_machine.py.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from urllib.parse import parse_qs, urlsplit

import pytest
from playwright.sync_api import Browser, Page, Route, expect

from dashboard.machine.content import details, history, machine_content
from tests.support.browser_page import OpenPage, violations, wait_until, welcome, wide, window
from tests.support.fake_machine import FakeClock, FakeSource, Gpu, divided, gpus, machine, process
from tests.support.server import Server

EVIL = "<img src=x onerror='window.pwned = 1'>"


@contextmanager
def tab(browser: Browser, server: Server, width: int, found: list[Gpu]) -> Iterator[Page]:
    """Open the page with these GPUs; it must be neither wider than its window nor violate axe."""
    with window(browser, width) as page:
        if found:
            answers(page, found)
        page.goto(f"{server.url}/hardware")
        expect(page.get_by_test_id("host")).to_contain_text("PyTorch")
        yield page
        assert wide(page, "[data-testid=devices] *", ".dv-scroll") == []
        assert violations(page) == []


@pytest.mark.parametrize("width", [1400, 400])
def test_without_a_gpu_it_shows_the_machine_with_a_reason_and_a_fix(
    browser: Browser, server: Server, width: int
) -> None:
    with tab(browser, server, width, []) as page:
        expect(page.get_by_test_id("no-gpu")).to_contain_text("driver")
        expect(page.get_by_test_id("gpus").locator("article")).to_have_count(0)


def test_it_is_updated_in_place_and_left_by_the_navigation(open_page: OpenPage) -> None:
    page = open_page()
    links = page.get_by_test_id("stHeader").get_by_role("link")
    expect(welcome(page)).to_be_visible()
    links.filter(has_text="Hardware").click()
    devices = page.get_by_test_id("devices")
    expect(page.get_by_test_id("host")).to_be_visible()
    page.evaluate("document.querySelector('[data-testid=host]').marked = true")
    seen = int(devices.get_attribute("data-polls") or 0)
    wait_until(lambda: int(devices.get_attribute("data-polls") or 0) > seen + 2, page)
    assert page.evaluate("document.querySelector('[data-testid=host]').marked")
    assert page.evaluate("!document.querySelector('[data-stale=true]')")
    links.get_by_text("Run", exact=True).click()
    expect(welcome(page)).to_be_visible()
    expect(devices).to_have_count(0)


# --- many GPUs ------------------------------------------------------------------------------------


def many(count: int) -> list[Gpu]:
    """Return GPUs in every state that the page shows."""
    found = gpus(count)
    found[1].values |= {"gpu/throttle_reasons": 0x40, "gpu/temp": 91.0}
    found[2].missing = dict.fromkeys(("gpu/util", "gpu/sm_active", "processes"), "permission")
    found[2].processes = None
    found[3] = divided(3)
    found[4].processes = (process(1, state="zombie", name=EVIL, command=EVIL, user=EVIL),)
    found[5].lost, found[5].values, found[5].processes = "lost: GPU is lost", {}, None
    found[6].recovery = "the GPU has to be reset"
    return found


def answers(page: Page, found: list[Gpu]) -> None:
    """Answer the page's requests with these GPUs, read for a minute."""
    clock = FakeClock()
    watched = machine(FakeSource(found), clock)
    for _ in range(60):
        clock.now += 1
        view = watched.poll()
    cuda = {gpu.info.uuid: gpu.info.nvml_index for gpu in found}

    def fulfill(route: Route) -> None:
        answer: dict[str, Any] = {"now": view.ts, "trouble": None, "gpu": None}
        answer["machine"] = machine_content(view, cuda, {})
        for uuid in parse_qs(urlsplit(route.request.url).query).get("gpu", []):
            device = next(device for device in view.devices if device.info.uuid == uuid)
            kept = watched.history(uuid)
            assert kept is not None
            answer["gpu"] = details(device, view.since, {}, "cuda:0", kept.seen)
            answer["gpu"]["history"] = history(kept.since(0.0))
        route.fulfill(body=json.dumps(answer), content_type="application/json")

    page.route("**/api/devices*", fulfill)


@pytest.mark.parametrize(("count", "width"), [(8, 1400), (8, 800), (8, 400), (16, 1400)])
def test_all_gpus_and_their_details(
    browser: Browser, server: Server, count: int, width: int
) -> None:
    with tab(browser, server, width, many(count)) as page:
        cards = page.get_by_test_id("gpus").locator("article")
        expect(cards).to_have_count(count)
        expect(cards.nth(1)).to_contain_text("throttling")
        expect(cards.nth(3)).to_contain_text("1g.10gb")
        expect(cards.nth(4)).to_contain_text(EVIL)
        if width == 1400:  # all are in view at once
            boxes = [box for box in (card.bounding_box() for card in cards.all()) if box]
            assert max(box["y"] + box["height"] for box in boxes) <= 1000
        for number in (2, 3, 4, 5) if count == 8 else ():  # hidden, divided, hostile, lost
            cards.nth(number).get_by_role("button").click()
            opened = page.get_by_test_id("gpu-details")
            expect(opened).to_contain_text(f"GPU {number}")
            expect(opened.get_by_text("UUID", exact=True)).to_be_visible()
            expect(opened).to_contain_text("Processes")
            if number == 3:
                words = re.compile("Utilization and activity: SM active 71%, ")
                chart = opened.locator(".dv-chart").first
                expect(chart).to_have_attribute("aria-label", words)
            assert violations(page) == []
        assert page.evaluate("window.pwned === undefined")
