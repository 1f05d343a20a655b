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


def test_an_alert_is_in_the_header_and_an_event(
    server: Server, open_page: Callable[..., Page], tmp_path: Path
) -> None:
    with training(tmp_path, server.runs) as run:
        page = open_page(f"/?run={run}")
        expect(page.get_by_test_id("status")).to_contain_text("Running")
        alerts = page.get_by_test_id("alerts")
        expect(alerts).to_be_hidden()

        (tmp_path / "low").touch()
        expect(alerts).to_contain_text("1 alert: ")
        expect(alerts).to_contain_text("<b>")  # text, never markup
        (tmp_path / "broken").touch()
        expect(alerts).to_contain_text("2 alerts: ")
        expect(alerts).to_contain_text("train/loss")
        row = page.get_by_test_id("events").locator("tr[data-kind=alert]")
        expect(row).to_have_count(2)
        assert violations(page) == []
        page.reload()
        expect(alerts).to_contain_text("2 alerts: ")
        expect(row).to_have_count(2)

        # One that is over goes by itself.
        (tmp_path / "low").unlink()
        expect(alerts).to_contain_text("1 alert: ")
        expect(row).to_have_count(3)
    expect(page.get_by_test_id("status")).to_contain_text("Finished")
    expect(alerts).to_be_hidden()
