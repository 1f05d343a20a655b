"""The server of the browser tests: what a test leaves is stopped, and a failed start too."""

from __future__ import annotations

from pathlib import Path

import psutil
import pytest
from playwright.sync_api import expect

from stepscope.host import child_process
from tests.support.browser_page import OpenPage, button, start, welcome
from tests.support.server import Server, start_server
from tests.support.shared_server import SharedServer


def test_a_run_that_a_test_leaves_is_stopped_and_removed(
    open_page: OpenPage, server: Server, shared_server: SharedServer
) -> None:
    page = open_page("/?epochs=5000&num_workers=1")
    start(page)
    page.goto("about:blank")
    shared_server.end_of_test()
    assert shared_server.get() is server
    assert not list(server.runs.iterdir())
    page.goto(server.url)
    expect(welcome(page)).to_be_visible()
    expect(button(page, "Start run")).to_be_enabled()


def test_a_server_that_does_not_start_is_ended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(child_process, "START_S", 0.5)
    before = {child.pid for child in psutil.Process().children()}
    with pytest.raises(pytest.fail.Exception):
        start_server(tmp_path, ("-c", "import time; time.sleep(600)"))
    assert {child.pid for child in psutil.Process().children()} <= before
