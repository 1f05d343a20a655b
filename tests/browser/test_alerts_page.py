"""An alert that is raised while the page is open: a toast, the header's count, the events."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from playwright.sync_api import Page, expect

from stepscope.run import run_folders
from tests.support.browser_page import violations
from tests.support.server import ROOT, Server
from tests.support.waiting import wait_until

SCRIPT = """
import pathlib, sys, time
import stepscope

here = pathlib.Path(sys.argv[1])
rec = stepscope.init("alerting", sample=False)
while not (here / "end").exists():
    low = (here / "low").exists()
    broken = (here / "broken").exists()
    rec.step({"my/score": 1.0 if low else 9.0}, loss=float("nan") if broken else 0.5)
    time.sleep(0.05)
"""
RULES = """
[rules.low_score]
metric = "my/score"
below = 5
clear_s = 0
text = "The score is {value} <b>"
"""


@contextmanager
def training(folder: Path, runs: Path) -> Iterator[str]:
    """A script that trains until the end of the block; yields the id of its run."""
    (folder / "train.py").write_text(SCRIPT)
    rules = folder / "alerts.toml"
    rules.write_text(RULES)
    rules.chmod(0o600)
    variables = {"STEPSCOPE_RUNS": str(runs), "STEPSCOPE_ALERTS": str(rules)}
    script = subprocess.Popen(
        [sys.executable, "train.py", str(folder)],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": str(ROOT), **variables},
    )
    try:
        wait_until(lambda: any(run_folders(runs)), 30)
        yield next(run_folders(runs)).name
        (folder / "end").touch()
        script.wait(20)
    finally:
        script.kill()
        script.wait()


def test_an_alert_is_a_toast_a_count_and_an_event(
    server: Server, open_page: Callable[..., Page], tmp_path: Path
) -> None:
    with training(tmp_path, server.runs) as run:
        page = open_page(f"/?run={run}")
        expect(page.get_by_test_id("status")).to_contain_text("Running")
        toasts, count = page.get_by_test_id("toasts"), page.get_by_test_id("alerts")
        expect(count).to_be_hidden()
        expect(toasts.locator(".ss-toast")).to_have_count(0)

        (tmp_path / "low").touch()
        low = toasts.locator("[aria-live=polite] .ss-toast")
        expect(low).to_contain_text("<b>")  # text, never markup
        expect(count).to_have_text("1 alert")
        (tmp_path / "broken").touch()
        broken = toasts.locator("[aria-live=assertive] .ss-toast")
        expect(broken).to_contain_text("train/loss")
        expect(count).to_have_text("2 alerts")
        row = page.get_by_test_id("events").locator("tr[data-kind=alert]")
        expect(row).to_have_count(2)
        assert violations(page) == []

        # By keyboard: the focus stays among the toasts that are left.
        page.get_by_role("button", name="Dismiss: train/loss").press("Enter")
        expect(broken).to_have_count(0)
        expect(low.get_by_role("button")).to_be_focused()
        expect(count).to_have_text("2 alerts")  # dismissed is not over

        # What was raised before the page was loaded is in the events and no toast.
        page.reload()
        expect(count).to_have_text("2 alerts")
        expect(row).to_have_count(2)
        expect(toasts.locator(".ss-toast")).to_have_count(0)

        # One that is over goes by itself.
        (tmp_path / "low").unlink()
        expect(count).to_have_text("1 alert")
        expect(row).to_have_count(3)
        (tmp_path / "low").touch()
        expect(low).to_have_count(1)
        (tmp_path / "low").unlink()
        expect(low).to_have_count(0)
        expect(row).to_have_count(5)
    expect(page.get_by_test_id("status")).to_contain_text("Finished")
    expect(count).to_be_hidden()
