"""axe-core finds nothing on any page, in both themes and several states; nothing is too wide."""

from __future__ import annotations

import json

import pytest
from playwright.sync_api import Browser, Page, expect

from tests.support.browser_page import (
    OpenPage,
    button,
    open_tab,
    settle,
    start,
    violations,
    welcome,
    wide,
    window,
)
from tests.support.fake_sweep import BEST, sweep
from tests.support.recorded_runs import write_slow_job
from tests.support.server import Server

EXAMPLES = ("cpu-training", "two-simulated-gpus")  # finished with look-only buttons, and failed
SWEEP = "20261122-061500-digits-mlp-ab12"
ADDRESSES = {
    "/?run=cpu-training&tab=memory": ".st-key-breakdown .js-plotly-plot",
    "/?run=job&tab=ranks": "[data-testid=stDataFrame]",
    "/runs": "[data-testid=stDataFrame]",
    "/compare?runs=h100,cpu-training": ".js-plotly-plot",
    f"/lab?sweep={SWEEP}": ".st-key-lab_patch",
    "/hardware": "[data-testid=stAlert]",
    "/learn?lesson=linear_regression": ".stCode",
}
"""Addresses, each with what shows that its page is drawn."""
DIFF = """--- a/train.py
+++ b/train.py
@@ -1,2 +1,2 @@
 import torch  # a line that is unchanged
-optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
+optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
"""


def show(page: Page, server: Server, run: str) -> None:
    page.goto(f"{server.url}/?run={run}")
    expect(page.get_by_test_id("stepscope-live")).to_have_attribute("data-ready", "1")


def unfold_all(page: Page) -> None:
    for summary in page.locator("summary").all():
        if summary.evaluate("node => !node.parentElement.open"):
            summary.click()


@pytest.mark.timeout(900)
@pytest.mark.parametrize("width", [1400, 400])
def test_no_page_has_a_violation_or_is_wider_than_the_window(
    browser: Browser, server: Server, width: int
) -> None:
    job = server.runs / f"job-{width}"
    sweep_folder = server.runs / "lab" / SWEEP
    sweep_folder.mkdir(parents=True)
    (sweep_folder / "plan.json").write_text("{}")
    content = sweep(combining=[], best=BEST)
    (sweep_folder / "sweep.json").write_text(json.dumps(content))
    (sweep_folder / "patch.json").write_text(json.dumps({"diff": DIFF, "by_hand": []}))
    with window(browser, width) as page:
        page.goto(server.url)
        expect(welcome(page)).to_be_visible()
        settle(page)
        assert violations(page) == []
        write_slow_job(job, "cpu")
        for address, drawn in ADDRESSES.items():
            page.goto(server.url + address.replace("run=job", f"run={job.name}"))
            expect(page.locator(drawn).first).to_be_visible()
            settle(page)
            assert violations(page) == [], address


@pytest.mark.timeout(900)
def test_no_tab_of_a_run_has_a_violation(browser: Browser, server: Server) -> None:
    with window(browser) as page:
        for run in EXAMPLES:
            show(page, server, run)
            unfold_all(page)
            assert violations(page) == []
            for tab in ("Profile", "Logs", "Details"):
                open_tab(page, tab)
                page.wait_for_url(f"**tab={tab.lower()}*")
                settle(page)
                assert violations(page) == [], tab
        page.goto(f"{server.url}/?epochs=5000")
        start(page)
        expect(page.get_by_test_id("chart-loss")).to_be_visible()
        expect(welcome(page)).to_have_count(0)
        settle(page)
        assert violations(page) == []
        button(page, "Stop").click()
        expect(page.get_by_test_id("status")).to_contain_text("Stopped")


def test_an_example_opens_by_one_click_and_then_by_its_address(
    open_page: OpenPage, server: Server
) -> None:
    page = open_page()
    page.locator(".st-key-example_cpu-training").get_by_role("button").click()
    expect(page.get_by_test_id("status")).to_contain_text("Finished")
    other = open_page(page.url.removeprefix(server.url))
    expect(other.get_by_test_id("status")).to_contain_text("Finished")
    expect(button(other, "Start run")).to_be_enabled()
    assert not any(server.runs.glob("*/run.json"))


def test_a_phone_starts_with_the_sidebar_closed_and_nothing_is_wider_than_it(
    browser: Browser, server: Server
) -> None:
    with window(browser, 400) as page:
        show(page, server, EXAMPLES[1])
        expect(page.get_by_test_id("status")).to_contain_text("Failed")
        expect(page.get_by_test_id("stSidebar")).not_to_be_in_viewport()
        assert wide(page, "[data-testid=stepscope-live] *, .stMain button", ".ss-scroll") == []
