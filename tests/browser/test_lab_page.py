"""The lab as a person uses it: tick, start, watch, stop, resume, report, take the best over."""

from __future__ import annotations

import json
import socket
import time
from pathlib import Path
from typing import Any

import pytest
from playwright.sync_api import Locator, Page, expect

from stepscope.common.files import atomic_write
from stepscope.run import process_identity, user_name
from tests.support.browser_page import (
    OpenPage,
    button,
    wait_until,
)
from tests.support.fake_sweep import sweep
from tests.support.server import Server

SLOW = pytest.mark.timeout(600)  # ten processes that import torch, on a machine that is busy
TRIALS = 7  # one to calibrate, and of two rounds: two settings and the baseline
ID = "20261122-061500-digits-mlp-ab12"
DIFF = """--- a/train.py
+++ b/train.py
@@ -1,2 +1,2 @@
 import torch  # a line that is unchanged
-optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
+optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
"""


def store(server: Server, status: str = "finished", **others: Any) -> Path:
    """Put a sweep into the server's folder, as another process would have written it."""
    folder = server.runs / "lab" / ID
    folder.mkdir(parents=True, exist_ok=True)
    owner = {"host": socket.gethostname(), "user": user_name()}
    content = owner | sweep(status, **others)
    (folder / "plan.json").write_text(json.dumps(content["plan"]))
    atomic_write(folder / "sweep.json", json.dumps(content), durable=False)
    return folder


def running(server: Server, **others: Any) -> Path:
    """Store a sweep that this process seems to measure."""
    return store(server, "running", updated=time.time(), **process_identity(), **others)


def row(page: Page, label: str) -> Locator:
    """Return a row of the table: its cells stand in the canvas as a table for screen readers."""
    return page.locator(".st-key-lab_table canvas tr").filter(has_text=label)


def tick(page: Page, name: str) -> None:
    box = page.get_by_role("checkbox", name=name, exact=True)
    page.get_by_test_id("stCheckbox").filter(has=box).locator("label").click()
    expect(box).to_be_checked()


def fill(page: Page, name: str, value: int) -> None:
    field = page.get_by_role("spinbutton", name=name)
    field.fill(str(value))
    field.press("Enter")


def start(page: Page, rounds: int) -> None:
    """Choose a sweep of two settings over short samples, and start it."""
    expect(button(page, "Start sweep")).to_be_disabled()
    page.get_by_role("combobox", name="Workload").click()
    page.get_by_role("option", name="Digits, MLP").click()
    page.get_by_text("Duration").click()
    fill(page, "Max rounds", rounds)
    fill(page, "Steps per trial", 20)
    for name in ("bf16 AMP", "optimizer_impl foreach"):
        tick(page, name)
    button(page, "Start sweep").click()
    expect(button(page, "Stop")).to_be_visible()
    expect(button(page, "Start sweep")).to_be_disabled()


def folder_of(server: Server) -> Path:
    (folder,) = (server.runs / "lab").iterdir()
    return folder


def samples(server: Server) -> int:
    path = folder_of(server) / "trials.jsonl"
    return len(path.read_text().splitlines()) if path.exists() else 0


def downloaded(page: Page, name: str) -> str:
    with page.expect_download() as download:
        button(page, name).click()
    return Path(download.value.path()).read_text()


@SLOW
def test_two_settings_from_ticking_by_stop_and_resume_to_the_report(
    open_page: OpenPage, server: Server
) -> None:
    page = open_page("/lab", expected="404")
    start(page, rounds=2)
    expect(row(page, "optimizer_impl foreach")).to_contain_text("measuring")
    page.goto("about:blank")  # nobody looks: it goes on
    had = samples(server)
    wait_until(lambda: samples(server) > had, page, 120)
    page.goto(f"{server.url}/lab")
    button(page, "Stop").click()
    expect(button(page, "Resume")).to_be_enabled()
    assert samples(server) < TRIALS
    button(page, "Resume").click()
    expect(button(page, "Stop")).to_be_visible()
    page.get_by_test_id("stHeader").get_by_role("link", name="Run", exact=True).click()
    expect(button(page, "Start run")).to_be_disabled()
    page.get_by_test_id("stHeader").get_by_role("link", name="Lab").click()
    expect(button(page, "Start sweep")).to_be_visible()
    expect(button(page, "Stop")).to_have_count(0, timeout=400_000)
    assert samples(server) == TRIALS  # the open round was measured as a whole
    for label in ("precision bf16", "optimizer_impl foreach"):
        expect(row(page, label)).to_contain_text("inconclusive")
    expect(page.locator(".st-key-lab_chart .js-plotly-plot")).to_be_visible()
    content = json.loads(downloaded(page, "JSON"))
    assert {one["name"] for one in content["variants"]} == {
        "precision=bf16",
        "optimizer_impl=foreach",
    }
    assert content["status"] == "finished"
    assert (content["progress"]["done"], content["progress"]["total"]) == (TRIALS, TRIALS)
    page.get_by_test_id("stHeader").get_by_role("link", name="Run", exact=True).click()
    expect(button(page, "Start run")).to_be_enabled()


def test_what_has_not_changed_is_not_drawn_anew(open_page: OpenPage, server: Server) -> None:
    running(server)
    page = open_page("/lab", expected="404")
    plot = page.locator(".st-key-lab_chart .js-plotly-plot")
    expect(plot).to_be_visible()
    page.get_by_text("Duration").click()
    field = page.get_by_role("spinbutton", name="Max rounds")
    field.fill("7")
    plot.evaluate("node => { node.dataset.mine = 'chart'; }")
    canvas = page.locator(".st-key-lab_table canvas").first
    canvas.evaluate("node => { node.dataset.mine = 'table'; }")
    before = page.get_by_role("progressbar").get_attribute("aria-valuenow")
    running(server, progress={"done": 48, "total": 96, "doing": "x", "seconds_left": 9.0})
    expect(page.get_by_role("progressbar")).not_to_have_attribute("aria-valuenow", before or "")
    assert page.locator("[data-mine]").count() == 2
    expect(field).to_have_value("7")  # typed, not yet sent
    running(server, variants=[])
    expect(plot).to_have_count(0)


def test_a_patch_of_a_script_is_downloaded(open_page: OpenPage, server: Server) -> None:
    patch = json.dumps({"diff": DIFF, "by_hand": []})
    (store(server) / "patch.json").write_text(patch)
    page = open_page("/lab", expected="404")
    assert downloaded(page, "Download") == DIFF
