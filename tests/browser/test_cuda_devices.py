"""The page Devices with eight GPUs, as a person uses it: on the simulator, or on GPUs."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from playwright.sync_api import Browser, Locator, Page, expect

from tests.conftest import Need
from tests.support.browser_page import (
    violations,
    window,
)
from tests.support.child_process import ROOT
from tests.support.server import Server, start_server, stop_server
from trainer.training.devices import cuda_reason

HELD = """
import sys, time, torch
last = torch.cuda.device_count() - 1
torch.cuda.set_device(last)
held = torch.zeros(300 * 2**20, dtype=torch.uint8, device="cuda")
torch.cuda.synchronize()
print(last, flush=True)
time.sleep(600)
"""


@pytest.fixture
def shared(tmp_path: Path) -> dict[str, str]:
    """Eight simulated GPUs that no other test shares."""
    return {"CUDASIM_DEVICES": "8", "CUDASIM_MEMORY": "1G", "CUDASIM_SHM": str(tmp_path / "gpus")}


@pytest.fixture
def server(
    need: Need, browser: Browser, tmp_path: Path, shared: dict[str, str]
) -> Iterator[Server]:
    need(cuda_reason())
    server = start_server(tmp_path, **shared)
    yield server
    stop_server(server)


@pytest.fixture
def other(shared: dict[str, str], server: Server) -> Iterator[tuple[int, int]]:
    """Another program, which holds memory of the last GPU: the GPU's number, the program's."""
    process = subprocess.Popen(
        [sys.executable, "-c", HELD],
        text=True,
        stdout=subprocess.PIPE,
        env=os.environ | shared | {"PYTHONPATH": str(ROOT)},
    )
    assert process.stdout is not None
    yield int(process.stdout.readline()), process.pid
    process.kill()
    process.wait()
    process.stdout.close()


def rows(page: Page) -> Locator:
    """Return the rows of the GPUs, which the table's canvas has for screen readers."""
    return page.get_by_test_id("stDataFrame").first.locator("canvas tbody tr")


def test_every_gpu_has_a_row_and_all_are_seen_at_once(
    browser: Browser, server: Server, other: tuple[int, int]
) -> None:
    with window(browser) as page:
        page.goto(f"{server.url}/hardware")
        expect(rows(page).first).to_contain_text("GPU 0")
        last, pid = other
        if last > 0:
            expect(rows(page).first).to_contain_text("none")
        expect(rows(page).nth(last)).to_contain_text(re.compile(r"you: \S*python"))
        expect(rows(page).nth(last)).to_contain_text(f"cuda:{last}")
        table = page.get_by_test_id("stDataFrame").first.bounding_box()
        assert table is not None
        assert table["y"] + table["height"] <= 1000
        assert violations(page) == []
        page.get_by_text("All values of a GPU").click()
        page.get_by_role("combobox", name="GPU", exact=True).click()
        page.get_by_role("option", name=re.compile(f"^GPU {last} ")).click()
        processes = page.get_by_test_id("stDataFrame").nth(2).locator("canvas tbody tr")
        expect(processes.first).to_contain_text(str(pid))
        assert violations(page) == []
