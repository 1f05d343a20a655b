"""A real server, and tabs whose consoles are watched."""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest
from playwright.sync_api import Browser, ConsoleMessage, Page, expect

from tests.support.server import ARTIFACTS, Server, start_server, stop_server

expect.set_options(timeout=60_000)  # ms: the first page imports torch on a busy machine


class Servers:
    """One server after the other; a test gets the one before if that has done no work of its own.

    A server that trained, measured or started a process keeps some of it, and is replaced.
    """

    def __init__(self, folders: pytest.TempPathFactory) -> None:
        self._folders = folders
        self._server: Server | None = None

    def get(self) -> Server:
        """Return a server without runs."""
        if self._server is None:
            self._server = start_server(self._folders.mktemp("server"), CUDA_VISIBLE_DEVICES="")
        return self._server

    def end_of_test(self) -> None:
        """Take the test's runs away, or the server with them."""
        server = self._server
        assert server is not None
        if self._has_worked(server):
            self.stop()
            return
        for path in server.runs.glob("*"):
            shutil.rmtree(path)

    def stop(self) -> None:
        """Stop the server, if there is one."""
        if self._server is not None:
            stop_server(self._server)
        self._server = None

    @staticmethod
    def _has_worked(server: Server) -> bool:
        pid = server.process.pid
        if server.process.poll() is not None or psutil.Process(pid).children():
            return True
        made = [json.loads(path.read_text()) for path in server.runs.rglob("run.json")]
        started = any(run.get("kind") == "trainer" and run.get("ended") is None for run in made)
        return started or any(run.get("pid") == pid for run in made) or _sweeps(server.runs)


def _sweeps(runs: Path) -> bool:
    return any((runs / "lab").glob("*/plan.json"))


@pytest.fixture(scope="module")
def _servers(tmp_path_factory: pytest.TempPathFactory, browser: Browser) -> Iterator[Servers]:
    servers = Servers(tmp_path_factory)
    yield servers
    servers.stop()


@pytest.fixture
def server(_servers: Servers) -> Iterator[Server]:
    """A server without runs: at most one run a server."""
    server = _servers.get()
    yield server
    # pytest shows it where the test failed
    log = server.log.read_text()[-4000:]
    sys.stdout.write(f"server: exit code {server.process.poll()}\n{log}\n")
    _servers.end_of_test()


@pytest.fixture
def open_page(
    browser: Browser, server: Server, request: pytest.FixtureRequest
) -> Iterator[Callable[..., Page]]:
    """Open a tab; at the end no tab may have put an error into its console."""
    context = browser.new_context(viewport={"width": 1400, "height": 1000})
    pages: list[Page] = []
    errors: list[str] = []

    def note(message: ConsoleMessage, expected: str | None) -> None:
        known = expected is not None and expected in message.text
        if message.type == "error" and not known:
            errors.append(message.text)

    def open_one(path: str = "/", expected: str | None = None) -> Page:
        """Open a page; `expected` is in the console's errors that the test is about."""
        page = context.new_page()
        page.set_default_timeout(20_000)
        page.on("console", lambda m: note(m, expected))
        page.on("pageerror", lambda error: errors.append(str(error)))
        page.goto(server.url + path)
        pages.append(page)
        return page

    yield open_one
    ARTIFACTS.mkdir(exist_ok=True)
    for number, page in enumerate(pages):
        page.screenshot(path=ARTIFACTS / f"{request.node.name}-{number}.png", full_page=True)
    context.close()
    if server.process.poll() is not None:
        # Chromium and Streamlit write lines about polls that a stopped server did not answer.
        gone = ("net::ERR_", "disconnected from server", "server endpoint", "still running?")
        errors = [text for text in errors if not any(word in text for word in gone)]
    assert errors == [], f"errors in the browser console: {errors}"
