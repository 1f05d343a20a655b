"""A profile as a person takes it: press, look at the parts, the stacks and the table, download."""

from __future__ import annotations

import gzip
import json
import re
import shutil
import sys
from pathlib import Path

from playwright.sync_api import Locator, Page, expect

from stepscope.profiling.summary import summarize, to_text
from stepscope.profiling.trace_stats import NODES_LIMIT
from tests.support.browser_page import OpenPage, button, open_tab, violations, wait_until
from tests.support.profiles import MAIN, STEP, trace_of
from tests.support.server import ROOT, Server

LONG = "/?epochs=5000"


def take_profile(page: Page, steps: int) -> None:
    header = page.get_by_test_id("header")
    header.get_by_role("group", name="Run").get_by_role("button", name="Profile").click()
    field = page.get_by_role("spinbutton", name="Steps to profile")
    expect(field).to_be_focused()
    assert field.input_value() == "5"
    field.fill(str(steps))
    field.press("Enter")
    answer = page.get_by_test_id("ack")
    expect(answer).to_have_text(re.compile(r"^Profile: steps? .* — done"), timeout=60_000)


def flame(page: Page) -> Locator:
    return page.get_by_test_id("profile")


def words(page: Page) -> str:
    return page.get_by_test_id("flame-text").inner_text()


def test_a_profile_from_the_press_to_the_trace(
    open_page: OpenPage, server: Server, tmp_path: Path
) -> None:
    page = open_page(LONG)
    button(page, "Start run").click()
    expect(page.get_by_test_id("status")).to_contain_text("Running", timeout=60_000)
    open_tab(page, "Profile")
    expect(page.get_by_text("No profile yet")).to_be_visible(timeout=60_000)
    take_profile(page, 3)
    expect(flame(page)).to_have_attribute("data-nodes", re.compile(r"\d{2,}"), timeout=30_000)
    expect(page.get_by_text("No profile yet")).to_have_count(0)
    button(page, "Stop").click()
    [folder] = server.runs.iterdir()
    for part in ("data", "forward", "backward", "optimizer", "other"):
        expect(flame(page).get_by_text(re.compile(rf"^{part} [\d.]+ % · "))).to_be_visible()
    expect(page.get_by_text("There is no CUDA time on a CPU.")).to_be_visible()
    expect(page.get_by_text("it stays in your browser")).to_be_visible()
    expect(page.get_by_test_id("stDataFrame")).to_be_visible()

    canvas = flame(page).locator("canvas")
    # Away from the row with the buttons, which sticks above.
    flame(page).locator(".ss-flame-box").evaluate("box => box.scrollIntoView({ block: 'center' })")
    canvas.click(position={"x": 200, "y": 90})
    zoomed = flame(page).get_attribute("data-zoom")
    assert zoomed != "-1"
    assert re.search(r": .* ms \([\d.]+ %\) in .* calls?$", words(page))
    page.keyboard.press("ArrowDown")
    below = words(page)
    page.keyboard.press("ArrowUp")
    assert words(page) != below
    page.keyboard.press("Escape")
    expect(flame(page)).to_have_attribute("data-zoom", "-1")
    canvas.click(position={"x": 200, "y": 90})
    flame(page).get_by_role("button", name="Whole profile").click()
    expect(flame(page)).to_have_attribute("data-zoom", "-1")
    assert violations(page) == []

    with page.expect_download() as download:
        page.get_by_role("button", name=re.compile(r"^Trace \(")).click()
    assert download.value.suggested_filename.startswith(folder.name)
    download.value.save_as(tmp_path / "trace.json.gz")
    events = json.loads(gzip.decompress((tmp_path / "trace.json.gz").read_bytes()))["traceEvents"]
    assert sum(event.get("name") == "backward" for event in events) >= 3


def test_a_large_profile_and_an_older_one(open_page: OpenPage, server: Server) -> None:
    folder = server.runs / "example"
    shutil.copytree(ROOT / "examples" / "cpu-training", folder)
    summary = summarize(trace_of(STEP), first=5, last=6, cuda=True, thread=MAIN)
    (folder / "profile-step-5-6.summary.json").write_text(to_text(summary))
    large = summary.flame
    for node in range(len(large.parent), NODES_LIMIT):
        large.parent.append(max(-1, node - 1 - node % 40))
        large.name.append(node % len(large.names))
        large.total_us.append(large.total_us[large.parent[-1]] / 2)
        large.calls.append(1)
    (folder / "profile-step-7-9.summary.json").write_text(to_text(summary))
    page = open_page("/?run=example&tab=profile")
    expect(flame(page)).to_have_attribute("data-nodes", str(NODES_LIMIT), timeout=60_000)
    drawn = page.evaluate(
        """() => { const canvas = document.querySelector(".ss-flame-box canvas");
        const began = performance.now();
        for (let x = 0; x < 50; x++)
          canvas.dispatchEvent(new MouseEvent("mousemove", { clientX: 300 + 9 * x,
            clientY: canvas.getBoundingClientRect().top + 30 }));
        return performance.now() - began; }"""
    )
    sys.stderr.write(f"50 moves over {NODES_LIMIT} nodes: {drawn:.0f} ms\n")
    # The page may be drawn anew while the list is open, which closes it.
    chooser = page.get_by_role("combobox", name=re.compile("Profile"))
    older = page.get_by_role("option", name="Steps 5 to 6")
    expect(chooser).to_have_count(1)

    def offered() -> bool:
        chooser.click()
        page.wait_for_timeout(1000)
        return older.count() == 1

    wait_until(offered, page, 60)
    older.click()
    expect(flame(page)).not_to_have_attribute("data-nodes", str(NODES_LIMIT), timeout=30_000)


def test_a_summary_that_is_none_is_told(open_page: OpenPage, server: Server) -> None:
    folder = server.runs / "example"
    shutil.copytree(ROOT / "examples" / "cpu-training", folder)
    (folder / "profile-step-5-6.summary.json").write_text('{"schema": 1, "first": "<b>"}')
    page = open_page("/?run=example&tab=profile")
    expect(page.get_by_text("This profile cannot be read")).to_be_visible(timeout=60_000)
