"""The Ranks tab of jobs of four ranks over gloo, from start to end, and of recorded jobs."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from playwright.sync_api import Browser, Locator, Page, expect

from stepscope.recorder.recorder import Recorder
from stepscope.run import RunStatus, read_run
from stepscope.run.rank_info import rank_numbers, read_rank_file
from tests.support.browser_page import (
    OpenPage,
    button,
    open_tab,
    settle,
    violations,
    wait_until,
    window,
)
from tests.support.server import ROOT, Server

SCRIPT = Path(__file__).with_name("scripts") / "slow_rank.py"
RANKS = 4
SLOW = 2
PATIENCE = 180_000
"""For the first page and the start of four processes on a busy machine."""
SLOW_TEST = pytest.mark.timeout(600)  # four processes that import torch on a busy machine


@pytest.fixture
def job(server: Server) -> Iterator[subprocess.Popen[bytes]]:
    """A job with a slow rank under torchrun and `stepscope watch`, killed at the end."""
    environment = os.environ | {
        "PYTHONPATH": str(ROOT),
        "STEPSCOPE_RUNS": str(server.runs),
        "OMP_NUM_THREADS": "1",
        "CUDA_VISIBLE_DEVICES": "",
    }
    torchrun = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={RANKS}"]
    job = subprocess.Popen(
        [sys.executable, *torchrun, "-m", "stepscope.watch", str(SCRIPT), "100000", str(SLOW)],
        env=environment,
        cwd=server.log.parent,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )
    yield job
    for pid in [*processes(server), job.pid]:
        try:
            os.kill(pid, signal.SIGKILL)
        except ProcessLookupError:
            continue
    job.wait(20)


def processes(server: Server) -> list[int]:
    """Return the processes of all live ranks."""
    runs = [path.parent for path in server.runs.glob("*/run.json")]
    files = [read_rank_file(folder, number) for folder in runs for number in rank_numbers(folder)]
    return [int(file.run_json["pid"]) for file in files if file.status.live]


def ranks(page: Page) -> Locator:
    """Open the tab and return its section in view: it polls only there."""
    expect(button(page, "Ranks")).to_be_visible()
    open_tab(page, "Ranks")
    section = page.get_by_test_id("ranks")
    expect(section).to_be_visible()
    section.scroll_into_view_if_needed()
    expect(section).to_have_attribute("data-ready", "1")
    return section


def row(section: Locator, rank: int) -> Locator:
    return section.locator(f"tr[data-rank='{rank}']")


def rows_contain(section: Locator, *words: str) -> None:
    expect(section.locator("tbody tr")).to_have_count(RANKS)
    for rank in range(RANKS):
        for word in words:
            expect(row(section, rank)).to_contain_text(word)


def order(section: Locator) -> list[int]:
    rows = section.locator("tbody tr").all()
    return [int(each.get_attribute("data-rank") or -1) for each in rows]


@SLOW_TEST
def test_a_job_with_a_slow_rank_and_a_killed_rank(
    server: Server, job: subprocess.Popen[bytes], open_page: OpenPage
) -> None:
    page = open_page()
    section = ranks(page)
    rows_contain(section, "CPU")

    # The diagnosis names the slow rank; its row is marked and first.
    verdict = section.get_by_test_id("rank-verdict")
    expect(verdict).to_have_attribute("data-kind", "straggler")
    expect(verdict).to_contain_text(re.compile(f"rank {SLOW}.*forward"))
    expect(row(section, SLOW)).to_have_attribute("data-named", "true")
    expect(section.locator("tbody tr").first).to_have_attribute("data-rank", str(SLOW))

    # A heatmap of another metric, and the arrow keys read its values.
    section.get_by_role("button", name="Waiting for ranks", exact=True).click()
    chart = section.get_by_test_id("rank-chart")
    expect(chart).to_have_attribute("aria-label", re.compile("^Waiting"))
    chart.focus()
    page.keyboard.press("ArrowDown")
    page.keyboard.press("ArrowDown")
    expect(chart.get_by_test_id("rank-reading")).to_have_text(re.compile(r"^Rank 1 .* ms$"))

    section.get_by_role("button", name="Rank", exact=True).click()
    assert order(section) == [0, 1, 2, 3]
    section.get_by_role("button", name=re.compile("^Rank")).click()
    assert order(section) == [3, 2, 1, 0]

    (folder,) = [path.parent for path in server.runs.glob("*/run.json")]
    os.kill(int(read_rank_file(folder, 3).run_json["pid"]), signal.SIGKILL)
    expect(row(section, 3)).to_contain_text("dead")
    assert job.wait(60) != 0
    expect(page.get_by_test_id("stepscope-live")).to_have_attribute(
        "data-status", re.compile("crashed|failed")
    )
    assert read_run(folder).status in (RunStatus.CRASHED, RunStatus.FAILED)
    expect(row(section, 3)).to_contain_text("dead")


def start_with_ddp(page: Page) -> None:
    """Choose DDP with four ranks in the sidebar, and press Start run."""
    sidebar = page.get_by_test_id("stSidebar")
    expect(button(page, "Start run")).to_be_enabled()
    sidebar.locator("summary").get_by_text("Distributed", exact=True).click()
    kind = sidebar.get_by_role("combobox", name="Strategy")
    kind.scroll_into_view_if_needed()
    settle(page)  # the group is still expanding, which would close a list
    kind.click()
    page.get_by_role("option", name="DDP", exact=True).click()
    devices = sidebar.get_by_label("Devices per node", exact=True)
    expect(devices).to_be_visible()
    devices.fill(str(RANKS))
    devices.press("Enter")
    wait_until(lambda: f"devices_per_node={RANKS}" in page.url, page)
    button(page, "Start run").click()


@SLOW_TEST
def test_a_built_in_run_from_start_to_stop(server: Server, open_page: OpenPage) -> None:
    page = open_page("/?workload=digits_mlp&epochs=5000")
    start_with_ddp(page)
    status = page.get_by_test_id("status")
    expect(status).to_contain_text("Running", timeout=PATIENCE)
    rows_contain(ranks(page), "alive")
    button(page, "Stop").click()
    expect(status).to_contain_text("Stopped", ignore_case=True)
    rows_contain(ranks(page), "stopped")
    assert processes(server) == []
    expect(button(page, "Start run")).to_be_enabled()


@SLOW_TEST
def test_many_ranks_are_readable_in_both_themes_and_on_a_phone(
    browser: Browser, server: Server
) -> None:
    folder = server.runs / "job-of-16"
    record(folder, steps=200, ranks=15)
    for width in (1400, 400):
        with window(browser, width) as page:
            page.goto(f"{server.url}/?run={folder.name}")
            expect(ranks(page).locator("tbody tr")).to_have_count(16)
            assert violations(page) == []


def record(folder: Path, steps: int, first: int = 0, ranks: int = 2) -> None:
    """Write an ended job; one more rank has written nothing. A host's folder begins at `first`."""
    folder.mkdir(parents=True)
    for number in range(ranks):
        recorder = Recorder(folder, name="train", rank=number)
        recorder.describe(rank=first + number, world_size=first + ranks + 1, device="cpu")
        for step in range(1, steps + 1):
            recorder.log(step, {"perf/step_time": 0.1 * step, "train/loss": 1.0})
        recorder.close(RunStatus.FINISHED)


def test_without_a_value_only_the_table_is_drawn(open_page: OpenPage, server: Server) -> None:
    record(server.runs / "empty", steps=0)
    section = ranks(open_page("/?run=empty"))
    expect(section.locator("tbody tr")).to_have_count(3)  # the third rank has written nothing
    expect(row(section, 1)).to_contain_text("finished")
    expect(row(section, 1).locator("td[data-column=step]")).to_have_text("n/a")
    expect(section.get_by_test_id("rank-chart")).to_be_hidden()
    expect(section.locator(".ss-modes:visible")).to_have_count(0)


def test_the_heatmap_and_lines_follow_the_axis_of_the_charts(
    open_page: OpenPage, server: Server
) -> None:
    record(server.runs / "far", steps=5, first=4)
    page = open_page("/?run=far")
    section = ranks(page)
    chart = section.get_by_test_id("rank-chart")
    reading = chart.get_by_test_id("rank-reading")

    def drawn(axis: str) -> None:
        expect(chart).to_have_attribute("aria-label", re.compile(f"^[^.]* {axis}\\."))

    drawn("steps")
    chart.focus()
    page.keyboard.press("ArrowDown")
    expect(reading).to_have_text(re.compile("^Rank 4 .* 500 ms$"))
    chart.hover(position={"x": 200, "y": 20})
    expect(reading).to_have_text(re.compile(r"^Rank 4 .* \d00(\.0)? ms$"))
    page.get_by_test_id("axis-switch").get_by_role("button", name="Time").click()
    drawn("time")
    expect(section).to_have_attribute("data-ready", "1")
    expect(reading).to_have_text("")
    chart.focus()
    page.keyboard.press("ArrowDown")
    expect(reading).to_have_text(re.compile("^Rank 4 .* 300 ms$"))
