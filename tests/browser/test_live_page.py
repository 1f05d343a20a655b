"""Start, watch, act, reload, stop on the Run page: a real server and real training."""

from __future__ import annotations

import re
import time

import numpy as np
from numpy.typing import NDArray
from playwright.sync_api import Page, Request, Route, expect

from stepscope.run import RunStatus, read_run
from stepscope.store import EventRow, StoreReader
from stepscope.store.recorder import Recorder
from tests.support.browser_page import (
    TRAINS_MS,
    OpenPage,
    axis_range,
    button,
    choose,
    drag_zoom,
    number,
    points,
    press,
    run_folder,
    start,
    step_of,
    wait_until,
    welcome,
)
from tests.support.server import Server

LONG = "/?epochs=5000"


def events(server: Server, kind: str) -> list[EventRow]:
    with StoreReader(run_folder(server)) as reader:
        return [event for event in reader.events() if event.kind == kind]


def after_polls(page: Page, count: int) -> None:
    """Wait until the page has asked for new points this many times."""
    live = page.get_by_test_id("stepscope-live")

    def polls() -> int:
        return int(live.get_attribute("data-polls") or 0)

    seen = polls()
    wait_until(lambda: polls() > seen + count, page)


def test_start_and_watch_the_loss_fall(open_page: OpenPage, server: Server) -> None:
    page = open_page()
    expect(welcome(page)).to_be_visible()
    choose(page, "Precision", "bf16 AMP")
    expect(page).to_have_url(re.compile("precision=bf16"))
    choose(page, "Precision", "fp32")
    for name in ("Pause", "Resume", "Stop", "Empty cache", "Mark"):
        expect(button(page, name)).to_have_count(0)
    start(page)
    wait_until(lambda: points(page) > 5, page)
    first_points, first_loss = points(page), number(page, "loss")
    wait_until(lambda: points(page) > first_points, page)
    wait_until(lambda: number(page, "loss") < first_loss / 2, page)
    expect(button(page, "Start run")).to_be_disabled()
    button(page, "Stop").click()
    expect(page.get_by_test_id("status")).to_contain_text("Stopped", ignore_case=True)
    expect(button(page, "Start run")).to_be_enabled()
    assert read_run(run_folder(server)).status is RunStatus.STOPPED


ACTIONS = [
    ("Empty cache", "empty_cache", {"before", "after"}),
    ("Reset peak stats", "reset_peaks", {"before", "after"}),
    ("Collect garbage", "collect_garbage", {"before", "after", "objects"}),
    ("Save checkpoint", "save_checkpoint", {"path", "bytes"}),
    ("Mark", "mark", {"after"}),
]


def test_each_button_acts_also_while_paused(open_page: OpenPage, server: Server) -> None:
    page = open_page(LONG)
    start(page)
    for name, kind, keys in ACTIONS:
        button(page, name).click()
        if kind == "mark":
            page.keyboard.press("Enter")
        wait_until(lambda kind=kind: bool(events(server, kind)), page)
        (event,) = events(server, kind)
        assert event.data["ok"] is True, name
        assert keys <= set(event.data), name
        for place in ("ack", "events"):
            expect(page.get_by_test_id(place)).to_contain_text(event.text[:30])
        expect(page.get_by_test_id("ack")).to_have_attribute("data-tone", "done")
        if kind == "save_checkpoint":
            assert (run_folder(server) / event.data["path"]).stat().st_size == event.data["bytes"]
    button(page, "Pause").click()
    expect(page.get_by_test_id("status")).to_contain_text("Paused")
    expect(button(page, "Resume")).to_be_enabled()
    after_polls(page, 2)
    held = step_of(page)
    button(page, "Collect garbage").click()
    wait_until(lambda: len(events(server, "collect_garbage")) == 2, page)
    after_polls(page, 2)
    assert step_of(page) == held
    button(page, "Resume").click()
    expect(page.get_by_test_id("status")).to_contain_text("Running")
    wait_until(lambda: step_of(page) > held, page)


def test_the_header_stays_in_sight_whole_and_works_by_keyboard(open_page: OpenPage) -> None:
    page = open_page(LONG, expected="403")
    expect(button(page, "Start run")).to_be_enabled()
    press(page, button(page, "Start run"))
    expect(page.get_by_test_id("status")).to_contain_text("Running", timeout=TRAINS_MS)
    cut = """node => [...node.querySelectorAll("button, span, select")].filter((part) =>
        part.checkVisibility() && (part.getBoundingClientRect().right > innerWidth ||
        part.tagName !== "SELECT" && part.scrollWidth > part.clientWidth + 1 &&
        getComputedStyle(part).display !== "inline")).map((part) => part.outerHTML)"""
    for width in (1280, 400, 1400):
        page.set_viewport_size({"width": width, "height": 400})
        assert page.get_by_test_id("header").evaluate(cut) == []
    page.get_by_test_id("events").evaluate("node => node.scrollIntoView({ block: 'start' })")
    expect(button(page, "Stop")).to_be_in_viewport()
    expect(page.get_by_test_id("chart-loss")).not_to_be_in_viewport()
    expect(button(page, "Start run")).to_be_disabled()
    button(page, "Pause").focus()
    for _ in range(2):
        page.keyboard.press("Tab")
    page.keyboard.press("Enter")  # Mark: its popover opens with the focus
    page.keyboard.type("by hand")
    page.keyboard.press("Enter")
    expect(page.get_by_test_id("ack")).to_contain_text("by hand")
    expect(page.get_by_test_id("ack")).to_have_attribute("data-tone", "done")
    expect(button(page, "Mark")).to_be_focused()
    page.keyboard.press("Enter")
    page.keyboard.press("Escape")
    expect(page.get_by_label("Event text")).to_be_hidden()

    # A press is shown before the server answers.
    held: list[Route] = []
    page.route("**/api/command", lambda route: held.append(route))
    button(page, "Pause").click()
    expect(page.get_by_test_id("ack")).to_contain_text("Pause")
    expect(button(page, "Pause")).to_have_attribute("aria-busy", "true")
    wait_until(lambda: bool(held), page)
    held[0].fulfill(status=403, json={"error": "because"})
    expect(page.get_by_test_id("ack")).to_have_text("because")
    expect(button(page, "Pause")).not_to_have_attribute("aria-busy", "true")


def test_a_store_that_cannot_be_read_is_named_with_a_fix(
    open_page: OpenPage, server: Server
) -> None:
    folder = server.runs / "damaged"
    folder.mkdir(parents=True)
    Recorder(folder, name="damaged").close(RunStatus.FINISHED)
    (folder / "rank0.sqlite").write_bytes(b"x" * 5000)
    page = open_page("/?run=damaged", expected="422")
    trouble = page.get_by_test_id("trouble")
    expect(trouble).to_contain_text("damaged")
    expect(page.get_by_test_id("status")).to_contain_text("Unreadable")
    asked: list[float] = []

    def note(request: Request) -> None:
        if "/api/series" in request.url:
            asked.append(time.monotonic())

    page.on("request", note)
    wait_until(lambda: len(asked) == 3, page)
    assert asked[2] - asked[0] > 1.5, "half as often as usual: it may be repaired"
    start(page)  # another run is shown as usual
    expect(trouble).to_be_hidden()


def test_zoom_survives_refreshes_and_a_reload(open_page: OpenPage, server: Server) -> None:
    page = open_page(LONG)
    start(page)
    wait_until(lambda: points(page) > 100, page)
    drag_zoom(page, "loss")
    expect(page.get_by_test_id("back-to-live")).to_be_visible()
    zoomed = axis_range(page, "loss")
    assert axis_range(page, "memory") == zoomed  # one x axis for all charts
    after_polls(page, 3)
    assert axis_range(page, "loss") == zoomed
    page.reload()
    expect(page.get_by_test_id("status")).to_contain_text("Running")
    expect(page.get_by_test_id("stepscope-live")).to_have_attribute("data-ready", "1")
    assert axis_range(page, "loss") == zoomed
    page.get_by_test_id("back-to-live").click()
    wait_until(lambda: axis_range(page, "loss") != zoomed, page)
    expect(page.get_by_test_id("back-to-live")).to_be_hidden()


def test_tabs_share_one_run_and_one_sampler_and_closing_them_stops_nothing(
    open_page: OpenPage, server: Server
) -> None:
    page = open_page(LONG)
    start(page)
    step = step_of(page)
    page.goto("about:blank")
    page, other = open_page(), open_page()  # a bare address finds the active run
    for each in (page, other):
        expect(each.get_by_test_id("status")).to_contain_text("Running")
    wait_until(lambda: step_of(page) > step, page)
    expect(button(other, "Start run")).to_be_disabled()
    folder = run_folder(server)

    def samples() -> NDArray[np.float64]:
        """Return the times of the samples."""
        with StoreReader(folder) as reader:
            info = next(info for info in reader.series() if info.stream == "samples")
            return reader.read(info.id, 0, info.rows, 1).ts

    wait_until(lambda: len(samples()) > 30, page)
    # Ten a second from one sampler; each of two would be as far from the other's as it happens.
    assert np.median(np.diff(samples())) > 0.08
    button(other, "Stop").click()
    expect(page.get_by_test_id("status")).to_contain_text("Stopped")
    expect(button(page, "Start run")).to_be_enabled()
