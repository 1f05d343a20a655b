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
from playwright.sync_api import Locator, Page, expect

from stepscope.run import RunStatus, read_run
from stepscope.run.rank_info import rank_numbers, read_rank_file
from tests.support.browser_page import (
    OpenPage,
    button,
    open_tab,
    settle,
    wait_until,
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
    """Open the tab and return the rows of its table, which the canvas has for screen readers."""
    expect(button(page, "Ranks")).to_be_visible()
    open_tab(page, "Ranks")
    rows = page.get_by_test_id("stDataFrame").first.locator("canvas tbody tr")
    expect(rows.first).to_be_attached()
    return rows


@SLOW_TEST
def test_a_job_with_a_slow_rank_and_a_killed_rank(
    server: Server, job: subprocess.Popen[bytes], open_page: OpenPage
) -> None:
    page = open_page()
    rows = ranks(page)
    expect(rows).to_have_count(RANKS)

    # The diagnosis names the slow rank; its row is first.
    warning = page.get_by_test_id("stAlert")
    expect(warning).to_contain_text(re.compile(f"rank {SLOW}.*forward"), timeout=PATIENCE)
    expect(rows.first.locator("td").first).to_have_text(str(SLOW))

    last_step = rows.first.locator("td").nth(4)
    expect(last_step).not_to_have_text(last_step.inner_text())

    (folder,) = [path.parent for path in server.runs.glob("*/run.json")]
    os.kill(int(read_rank_file(folder, 3).run_json["pid"]), signal.SIGKILL)
    killed = rows.filter(has=page.locator("td:first-child", has_text=re.compile("^3$")))
    expect(killed).to_contain_text("dead")
    assert job.wait(60) != 0
    expect(page.get_by_test_id("stepscope-live")).to_have_attribute(
        "data-status", re.compile("crashed|failed")
    )
    assert read_run(folder).status in (RunStatus.CRASHED, RunStatus.FAILED)
    expect(killed).to_contain_text("dead")


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
    devices = sidebar.get_by_label("Devices", exact=True)
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
    expect(ranks(page).filter(has_text="alive")).to_have_count(RANKS)
    button(page, "Stop").click()
    expect(status).to_contain_text("Stopped", ignore_case=True)
    expect(ranks(page).filter(has_text="stopped")).to_have_count(RANKS)
    assert processes(server) == []
    expect(button(page, "Start run")).to_be_enabled()
