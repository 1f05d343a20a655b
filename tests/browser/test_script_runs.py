"""Runs of other processes in a browser: they appear, execute commands and end."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from playwright.sync_api import Locator, Page, expect

from stepscope.run import RunStatus, read_run
from tests.support.browser_page import (
    OpenPage,
    axis_range,
    button,
    drag_zoom,
    number,
    open_tab,
    points,
    step_of,
    wait_until,
    welcome,
)
from tests.support.server import ROOT, Server

SCRIPTS = Path(__file__).with_name("scripts")
Begin = Callable[..., "subprocess.Popen[bytes]"]


@pytest.fixture
def begin(server: Server) -> Iterator[Begin]:
    """Begin runs in child processes, which are killed at the end."""
    children: list[subprocess.Popen[bytes]] = []
    environment = os.environ | {"PYTHONPATH": str(ROOT), "STEPSCOPE_RUNS": str(server.runs)}
    options: Any = {"env": environment, "cwd": server.log.parent}
    options |= {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}

    def run(*words: str) -> subprocess.Popen[bytes]:
        children.append(subprocess.Popen([sys.executable, *words], **options))
        return children[-1]

    yield run
    for child in children:
        child.kill()
        child.wait(10)


def foreign(begin: Begin, server: Server, run: str, **run_info: Any) -> subprocess.Popen[bytes]:
    """Begin a run by the Recorder alone, with these values in run.json."""
    return begin(str(SCRIPTS / "foreign_run.py"), str(server.runs / run), json.dumps(run_info))


def picker(page: Page) -> Locator:
    return page.get_by_role("combobox", name="Run", exact=True)


def choices(page: Page) -> list[str]:
    """The runs that the list offers now, in its order."""
    return picker(page).locator("option").all_inner_texts()[1:]


def shown(page: Page) -> str:
    return picker(page).locator("option:checked").inner_text()


def whole(page: Page, chart: str) -> bool:
    """Whether a chart is drawn from the first step on, but for those of the last two seconds."""
    return points(page, chart) >= min(step_of(page), 250) - 40 > 0


def test_a_run_appears_by_itself_and_the_list_follows(
    open_page: OpenPage, server: Server, begin: Begin
) -> None:
    page = open_page()
    expect(welcome(page)).to_be_visible()
    foreign(begin, server, "1-first")
    expect(page.get_by_test_id("status")).to_contain_text("Running")
    expect(page).to_have_url(re.compile("run=1-first"))
    wait_until(lambda: points(page) > 5, page)
    wait_until(lambda: shown(page).startswith("● train.py"), page)
    node = page.get_by_test_id("stepscope-live").element_handle()
    foreign(begin, server, "2-second", name="other", script=None)
    wait_until(lambda: len(choices(page)) == 2, page)
    assert choices(page)[0].startswith("● other")
    expect(page).to_have_url(re.compile("run=1-first"))  # what is shown stays
    assert node.evaluate("node => node.isConnected")  # and was not drawn anew
    button(page, "Stop").click()
    expect(page.get_by_test_id("status")).to_contain_text("Stopped")
    wait_until(lambda: "●" not in shown(page), page)
    assert choices(page)[0].startswith("● other")  # an ended run moves down
    picker(page).select_option("2-second")
    expect(page).to_have_url(re.compile("run=2-second"))
    expect(page.get_by_test_id("status")).to_contain_text("Running")


def test_new_and_expanded_charts_are_complete_and_leave_the_zoom(
    open_page: OpenPage, server: Server, begin: Begin
) -> None:
    foreign(begin, server, "gan")
    page = open_page()
    expect(page.get_by_test_id("status")).to_contain_text("Running")
    expect(page.get_by_test_id("stepscope-live")).to_have_attribute("data-ready", "1")
    drag_zoom(page, "memory")
    zoomed = axis_range(page, "memory")
    page.get_by_test_id("chart-memory").evaluate("node => (node.dataset.kept = 1)")
    expect(page.get_by_test_id("chart-custom:train/d_real")).to_be_visible()
    expect(page.get_by_test_id("chart-loss")).to_contain_text("SGD")
    expect(page.get_by_test_id("chart-memory")).to_have_attribute("data-kept", "1")
    assert axis_range(page, "memory") == zoomed
    page.get_by_test_id("back-to-live").click()
    # What the page had not asked for at first is there from the beginning.
    own = page.get_by_test_id("chart-custom:train/accuracy")
    own.scroll_into_view_if_needed()
    wait_until(lambda: whole(page, "custom:train/accuracy"), page)
    folded = page.get_by_test_id("more")
    expect(folded).to_contain_text("Learning rate")
    expect(page.get_by_test_id("chart-learning_rate")).to_be_hidden()
    folded.locator("summary").click()
    page.get_by_test_id("chart-learning_rate").scroll_into_view_if_needed()
    wait_until(lambda: whole(page, "learning_rate"), page)
    expect(page.get_by_test_id("chart-grad_norm")).to_be_visible()
    expect(page.get_by_test_id("chart-amp_scale")).to_be_hidden()  # this run has none
    page.reload()
    expect(page.get_by_test_id("chart-learning_rate")).to_be_visible()


def test_a_script_under_watch_executes_commands_and_stops(
    open_page: OpenPage, server: Server, begin: Begin
) -> None:
    page = open_page()
    expect(welcome(page)).to_be_visible()
    child = begin("-m", "stepscope.watch", str(SCRIPTS / "plain_loop.py"), "--flag")
    status, ack = page.get_by_test_id("status"), page.get_by_test_id("ack")
    expect(status).to_contain_text("Running")
    wait_until(lambda: points(page) > 5, page)
    wait_until(lambda: shown(page).startswith("● plain_loop.py"), page)
    assert number(page, "samples_per_sec") > 0
    expect(page.get_by_test_id("more")).to_contain_text("Learning rate")
    for name in ("Save checkpoint", "Memory snapshot", "Resume"):
        expect(button(page, name)).to_have_count(0)
    button(page, "Mark").click()
    page.get_by_label("Event text", exact=True).fill("here")
    page.keyboard.press("Enter")
    expect(ack).to_contain_text("here")
    expect(ack).to_have_attribute("data-tone", "done")
    button(page, "Collect garbage").click()
    expect(ack).to_contain_text("objects")
    for name, shown_as in (("Pause", "Paused"), ("Resume", "Running")):
        button(page, name).click()
        expect(status).to_contain_text(shown_as)
    button(page, "Stop").click()
    assert child.wait(20) == 130  # as at Ctrl-C, with the script's own output
    expect(status).to_contain_text("Stopped")
    expect(button(page, "Stop")).to_have_count(0)
    open_tab(page, "Logs")
    expect(page.locator(".stCode").first).to_contain_text("interrupted")
    (folder,) = server.runs.iterdir()
    assert read_run(folder).status is RunStatus.STOPPED
