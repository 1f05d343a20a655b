"""The sidebar's groups open in a browser, and a switch in one of them is what the run gets."""

from __future__ import annotations

import json

from playwright.sync_api import expect

from tests.support.browser_page import OpenPage, button, run_folder, wait_until
from tests.support.server import Server

GROUPS = {
    "Training": "Max steps",
    "Performance": "torch.compile",
    "Data loading": "num_workers",
    "Distributed": "Strategy",
    "Advanced": "CPU threads",
}


def test_each_group_opens_and_a_switch_reaches_the_run(open_page: OpenPage, server: Server) -> None:
    page = open_page("/?workload=linear&epochs=2")
    expect(button(page, "Start run")).to_be_enabled(timeout=60_000)
    sidebar = page.get_by_test_id("stSidebar")
    for group, first in GROUPS.items():
        inside = sidebar.get_by_label(first, exact=True).first
        expect(inside).to_be_hidden()
        sidebar.locator("summary").get_by_text(group, exact=True).click()
        expect(inside).to_be_visible()
    sidebar.get_by_text("zero_grad(set_to_none)", exact=True).click()
    steps = sidebar.get_by_label("Max steps", exact=True)
    steps.fill("7")
    steps.press("Enter")
    expect(sidebar.get_by_label("Max steps", exact=True)).to_be_visible()  # it stays open
    wait_until(lambda: "set_to_none=0" in page.url and "max_steps=7" in page.url, page)
    button(page, "Start run").click()
    wait_until(lambda: any(server.runs.glob("*/run.json")), page)
    config = json.loads((run_folder(server) / "run.json").read_text())["config"]
    assert config["set_to_none"] is False
    assert config["max_steps"] == 7
