"""The page with a live run of another host in a browser, and a connection that is lost."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from playwright.sync_api import Page, expect

from tests.support.app_page import record
from tests.support.browser_page import OpenPage, button, points, step_of, wait_until
from tests.support.server import ROOT, Server, start_server, stop_server
from tests.support.waiting import wait_for

SCRIPTS = Path(__file__).with_name("scripts")


@pytest.fixture
def far(tmp_path: Path) -> Iterator[Path]:
    """The runs of the other host: "live", which steps every 50 ms, and "old"."""
    folder = tmp_path / "far"
    folder.mkdir()
    record(folder, "old")
    command = [sys.executable, str(SCRIPTS / "foreign_run.py"), str(folder / "live")]
    child = subprocess.Popen(command, env=os.environ | {"PYTHONPATH": str(ROOT)})
    yield folder
    child.kill()
    child.wait(10)


@pytest.fixture
def cut(tmp_path: Path) -> Path:
    """The file that cuts the connection."""
    return tmp_path / "cut"


@pytest.fixture
def server(tmp_path: Path, far: Path, cut: Path) -> Iterator[Server]:
    """A server without local runs, and a program in the place of ssh that the test can cut."""
    ssh = tmp_path / "ssh"
    ssh.write_text(
        "#!/bin/sh\n"
        "for last; do :; done\n"
        f"[ ! -e {cut} ] || {{ echo 'ssh: Connection refused' >&2; exit 255; }}\n"
        f"(while [ ! -e {cut} ] && kill -0 $$; do sleep 0.1; done; kill $$) 2>/dev/null &\n"
        'eval "exec $last"\n'
    )
    ssh.chmod(0o755)
    (tmp_path / "runs").mkdir()
    made = start_server(
        tmp_path,
        CUDA_VISIBLE_DEVICES="",
        STEPSCOPE_SOURCES=json.dumps([f"ssh://login1{far}"]),
        STEPSCOPE_SSH=str(ssh),
        XDG_CACHE_HOME=str(tmp_path / "cache"),
    )
    mirror = tmp_path / "cache" / "stepscope" / "remote"
    wait_for(lambda: len(list(mirror.glob("*/*/run.json"))) == 2, 60)
    yield made
    stop_server(made)


def answered(page: Page, text: str) -> None:
    expect(page.get_by_test_id("ack")).to_have_attribute("data-tone", "done")
    expect(page.get_by_test_id("ack")).to_contain_text(text)


def test_a_live_remote_run_survives_a_lost_connection_and_an_old_one_is_loaded(
    open_page: OpenPage, server: Server, cut: Path
) -> None:
    page = open_page("/?run=live")
    source, status = page.get_by_test_id("source"), page.get_by_test_id("status")
    expect(source).to_contain_text(re.compile(r"^login1/.* · \d+ ms$"))
    wait_until(lambda: points(page) > 5, page)
    button(page, "Mark").click()
    page.keyboard.type("lower rate")
    page.keyboard.press("Enter")
    answered(page, "lower rate")
    button(page, "Collect garbage").click()
    answered(page, "Collect garbage")

    cut.touch()
    expect(source).to_have_attribute("style", re.compile("orange"))
    lost = page.get_by_test_id("warnings").get_by_text("refused")
    expect(lost).to_have_count(1)
    expect(status).to_contain_text("Running")
    stayed = step_of(page)

    cut.unlink()
    expect(source).to_have_attribute("style", re.compile("gray"))
    expect(lost).to_have_count(0)
    wait_until(lambda: step_of(page) > stayed + 10, page)
    expect(status).to_contain_text("Running")

    cut.touch()
    page.get_by_role("combobox", name="Run", exact=True).select_option("old")
    loading = page.get_by_test_id("loading")
    expect(loading).to_contain_text("refused")
    cut.unlink()
    expect(loading).to_be_hidden()
    wait_until(lambda: points(page) == 1, page)
