"""A profile as a person takes it: press, look at the table, download."""

from __future__ import annotations

import gzip
import json
import re
from pathlib import Path

from playwright.sync_api import Page, expect

from tests.support.browser_page import OpenPage, button, open_tab, settle, start, violations
from tests.support.server import Server

LONG = "/?epochs=5000"


def take_profile(page: Page, steps: int) -> None:
    header = page.get_by_test_id("header")
    header.get_by_role("group", name="Run").get_by_role("button", name="Profile").click()
    field = page.get_by_role("spinbutton", name="Steps to profile")
    expect(field).to_be_focused()
    assert field.input_value() == "5"
    field.fill(str(steps))
    field.press("Enter")
    expect(page.get_by_test_id("ack")).to_have_attribute("data-tone", "done")


def test_a_profile_from_the_press_to_the_trace(
    open_page: OpenPage, server: Server, tmp_path: Path
) -> None:
    page = open_page(LONG)
    start(page)
    open_tab(page, "Profile")
    take_profile(page, 3)
    table = page.get_by_test_id("stDataFrame")
    expect(table).to_be_visible()
    button(page, "Stop").click()
    [folder] = server.runs.iterdir()
    settle(page)
    assert violations(page) == []

    with page.expect_download() as download:
        page.get_by_role("button", name=re.compile(r"^Trace \(")).click()
    assert download.value.suggested_filename.startswith(folder.name)
    download.value.save_as(tmp_path / "trace.json.gz")
    events = json.loads(gzip.decompress((tmp_path / "trace.json.gz").read_bytes()))["traceEvents"]
    assert sum(event.get("name") == "backward" for event in events) >= 3
