"""The page Devices on a machine without a GPU; and with made-up answers of a machine with many.

The made-up answers are those of the server for the GPUs of tests/support/fake_machine.py.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any
from urllib.parse import parse_qs, urlsplit

import pytest
from playwright.sync_api import Browser, Page, Route, expect

from dashboard.machine.content import machine_content
from dashboard.machine.details import details, history
from tests.support.browser_page import OpenPage, violations, wait_until
from tests.support.fake_machine import FakeClock, FakeSource, Gpu, divided, gpus, machine, process
from tests.support.server import ARTIFACTS, Server, start_server, stop_server


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
    page.goto(f"{server.url}/hardware?tab=gpus")
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
    page = open_page("/hardware?tab=gpus", "404")  # Streamlit looks for two files below a deep link
    expect(page.get_by_test_id("host")).to_be_visible(timeout=60_000)
    page.evaluate("document.querySelector('[data-testid=host]').marked = true")
    seen = polls(page)
    wait_until(lambda: polls(page) > seen + 2, page, 20)
    assert page.evaluate("document.querySelector('[data-testid=host]').marked")
    assert page.evaluate("!document.querySelector('[data-stale=true]')")


def test_it_stands_between_lab_and_learn_and_one_comes_back_from_it(open_page: OpenPage) -> None:
    page = open_page()
    links = page.get_by_test_id("stHeader").get_by_role("link")
    expect(page.get_by_text("No run is shown", exact=True)).to_be_visible(timeout=60_000)
    names = [name.strip() for name in links.all_inner_texts() if name.strip()]
    assert names.index("Lab") < names.index("Hardware") < names.index("Learn")
    links.filter(has_text="Hardware").click()
    expect(page.get_by_test_id("host")).to_be_visible()
    page.get_by_test_id("stHeader").get_by_role("link", name="Run", exact=True).click()
    expect(page.get_by_text("No run is shown", exact=True)).to_be_visible()
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


# --- many GPUs ------------------------------------------------------------------------------------

EVIL = "<img src=x onerror='window.pwned = 1'>"


def many(count: int) -> list[Gpu]:
    """GPUs in every state that a page has to show."""
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
    """Let the page believe in these GPUs, seen for a minute."""
    clock = FakeClock()
    watched = machine(FakeSource(found), clock)
    for _ in range(60):
        clock.now += 1
        view = watched.look()
    cuda = {gpu.info.uuid: gpu.info.nvml_index for gpu in found}

    def fulfill(route: Route) -> None:
        answer: dict[str, Any] = {"now": view.ts, "trouble": None, "gpu": None}
        answer["machine"] = machine_content(view, cuda, {})
        for uuid in parse_qs(urlsplit(route.request.url).query).get("gpu", []):
            device = next(device for device in view.devices if device.info.uuid == uuid)
            kept = watched.history(uuid)
            assert kept is not None
            answer["gpu"] = details(device, view.since, None, {}, "cuda:0", kept.seen)
            answer["gpu"]["history"] = history(kept.since(0.0))
        route.fulfill(body=json.dumps(answer), content_type="application/json")

    page.route("**/api/devices*", fulfill)


@pytest.mark.parametrize("theme", ["light", "dark"])
@pytest.mark.parametrize("count", [8, 16])
def test_all_gpus_are_seen_at_once(
    browser: Browser, server: Server, count: int, theme: str
) -> None:
    context = browser.new_context(
        viewport={"width": 1400, "height": 1000},
        color_scheme="light" if theme == "light" else "dark",
    )
    page = context.new_page()
    answers(page, many(count))
    page.goto(f"{server.url}/hardware?tab=gpus")
    cards = page.get_by_test_id("gpus").locator("article")
    expect(cards).to_have_count(count, timeout=60_000)
    boxes = [box for box in (card.bounding_box() for card in cards.all()) if box]
    assert max(box["y"] + box["height"] for box in boxes) <= 1000
    expect(cards.nth(1)).to_contain_text("Thermal throttling now, by the")
    expect(cards.nth(3)).to_contain_text("1g.10gb")
    expect(cards.nth(4)).to_contain_text(EVIL)
    assert violations(page) == []
    ARTIFACTS.mkdir(exist_ok=True)
    page.screenshot(path=ARTIFACTS / f"devices-{count}-{theme}.png")
    for number in (2, 3, 4, 5) if count == 8 else ():  # hidden, divided, hostile, lost
        cards.nth(number).get_by_role("button").click()
        opened = page.get_by_test_id("gpu-details")
        expect(opened).to_contain_text(f"GPU {number} · ")
        expect(opened.get_by_text("UUID", exact=True)).to_be_visible()
        assert violations(page) == []
    assert page.evaluate("window.pwned === undefined")
    context.close()


def test_the_numbers_under_the_pointer_are_those_of_that_time(
    browser: Browser, server: Server
) -> None:
    page = browser.new_page(viewport={"width": 1400, "height": 1000})
    answers(page, gpus(1))
    page.goto(f"{server.url}/hardware?tab=gpus")
    page.get_by_role("button", name="GPU 0").click(timeout=60_000)
    chart = page.locator(".dv-chart").first
    words = "utilization 97%, SM active 71%, tensor cores 33%, DRAM 45%"
    expect(chart).to_have_attribute(
        "aria-label", f"Utilization and activity: {words}", timeout=30_000
    )
    for entry in words.split(", "):
        expect(chart.locator(".legend")).to_contain_text(entry)
    chart.locator(".nsewdrag").hover()
    expect(chart.locator(".hoverlayer")).to_contain_text(re.compile("utilization [0-9]+%"))
    page.mouse.move(0, 0)
    expect(chart.locator(".hoverlayer .legend")).to_have_count(0)
    page.close()


@pytest.mark.parametrize("width", [400, 800])
def test_an_open_gpu_is_not_wider_than_a_phone(
    browser: Browser, server: Server, width: int
) -> None:
    page = browser.new_page(viewport={"width": width, "height": 800})
    answers(page, many(8))
    page.goto(f"{server.url}/hardware?tab=gpus")
    page.get_by_role("button", name="GPU 4").click(timeout=60_000)
    expect(page.get_by_test_id("gpu-details")).to_contain_text("Processes")
    assert page.evaluate("document.documentElement.scrollWidth") <= width
    wide = """nodes => nodes.filter(node => node.getBoundingClientRect().right > innerWidth
            && !node.closest(".dv-scroll"))
        .map(node => node.outerHTML.slice(0, 120))"""
    assert page.locator("[data-testid=devices] *").evaluate_all(wide) == []
    page.close()
