"""The Compare page in Chromium: two real runs side by side, and what it measures up to."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from playwright.sync_api import Locator, Page, expect

from stepscope.run import RunStatus
from tests.support.browser_page import OpenPage
from tests.support.server import Server
from trainer.config import RunConfig
from trainer.runners.training_run import run


def train(server: Server, name: str, **settings: Any) -> Path:
    """Train a small model in this process."""
    folder = server.runs / name
    folder.mkdir(parents=True)
    config = RunConfig(workload="linear", device="cpu", epochs=3, channels_last=False, **settings)
    assert run(config, folder) is RunStatus.FINISHED
    return folder


def rows(page: Page, table: str) -> Locator:
    """Return the rows of a table: its cells are in the canvas for screen readers."""
    return page.get_by_label(f"{table} of the runs", exact=True).locator("tr")


def test_two_real_runs_are_compared(open_page: OpenPage, server: Server) -> None:
    train(server, "slow", learning_rate=0.001)
    train(server, "fast", learning_rate=0.1)
    page = open_page("/compare?runs=slow,fast", expected="404")
    expect(page.locator(".js-plotly-plot")).to_have_count(2)
    loss = page.locator(".js-plotly-plot").first
    lines = "node => node.data.filter((trace) => trace.showlegend !== false).length"
    assert loss.evaluate(lines) == 2
    setting = rows(page, "Configuration").filter(has_text="learning_rate").last  # below the names
    expect(setting).to_contain_text("0.1")
    expect(rows(page, "Configuration")).to_have_count(2)  # the title, and the only difference
    step_time = rows(page, "Figures").filter(has_text="Step time")
    expect(step_time).to_contain_text("%")
    page.get_by_role("combobox", name="Group by").click()
    page.get_by_role("option", name="learning_rate").click()
    expect(loss.locator(".legend")).to_contain_text("learning_rate: 0.001")
    page.get_by_role("link", name="Runs", exact=True).last.click()
    expect(page).to_have_url(re.compile("/runs"))
