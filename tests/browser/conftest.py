"""A real server, and tabs whose consoles are watched."""

from __future__ import annotations

import contextlib
import shutil
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest
from playwright.sync_api import Browser, ConsoleMessage, Page, expect

from stepscope.run import RunError, RunKind, read_run, run_folders
from stepscope.store import StoreError
from stepscope.store.reader import send_command
from stepscope.store.recorder import CommandName
from tests.support.server import ARTIFACTS, Server, start_server, stop_server
from tests.support.waiting import wait_until


class SharedServer:
    """One server for all browser tests of a process, without runs at the start of each test.

    It stays while tests leave it as they found it. What it keeps of earlier tests, the sessions of
    closed tabs, the last results of lessons and the diagnoses of ended runs by folder, no later
    test may depend on: a run folder's name is used by one test only.
    """

    def __init__(self, folders: pytest.TempPathFactory) -> None:
        self._folders = folders
        self._server: Server | None = None
        self._names: set[str] = set()

    def get(self) -> Server:
        """Return the server; start it if there is none. No GPU even on the simulator."""
        if self._server is None:
            self._server = start_server(
                self._folders.mktemp("server"), CUDA_VISIBLE_DEVICES="", CUDASIM_NO_DRIVER="1"
            )
            self._names = set()
        return self._server

    def end_of_test(self) -> None:
        """Stop and remove the test's runs; stop a server that is not as it was before them."""
        server = self.get()
        names = {folder.name for folder in run_folders(server.runs)}
        if known := self._names & names:
            self.stop()
            pytest.fail(f"the server knows runs of these names, choose others: {known}")
        self._names |= names
        if server.process.poll() is not None:
            self._server = None
            return
        try:
            _stop_runs(server)
            wait_until(lambda: not _children(server), 20)
            wait_until(lambda: _emptied(server.runs), 20)
        except (AssertionError, RunError):  # what it started goes on
            self.stop()

    def stop(self) -> None:
        """Stop the server, if there is one."""
        server, self._server = self._server, None
        if server is not None:
            stop_server(server)


def _stop_runs(server: Server) -> None:
    """Stop the runs that the server trains, as the page's button does."""
    for folder in run_folders(server.runs):
        run = read_run(folder)
        if run.status.live and run.run_json.get("kind") == RunKind.TRAINER:
            with contextlib.suppress(StoreError):  # it begins or ends just now
                send_command(folder, CommandName.STOP, {})
            wait_until(lambda folder=folder: not read_run(folder).status.live, 20)


def _emptied(folder: Path) -> bool:
    """Remove all from a folder; return False if a run that has just ended still writes there."""
    for path in folder.glob("*"):
        if path.is_dir():
            shutil.rmtree(path, ignore_errors=True)
        else:
            path.unlink(missing_ok=True)
    return not any(folder.glob("*"))


def _children(server: Server) -> list[psutil.Process]:
    """Return the processes that work for the server; the helpers of multiprocessing stay."""
    try:
        found = psutil.Process(server.process.pid).children(recursive=True)
        return [
            child
            for child in found
            if child.status() != psutil.STATUS_ZOMBIE
            and "from multiprocessing." not in " ".join(child.cmdline())
        ]
    except psutil.NoSuchProcess:
        return []


expect.set_options(timeout=60_000)  # ms: the first page imports torch on a busy machine


_FAILED = pytest.StashKey[bool]()


@pytest.fixture(scope="session")
def shared_server(
    tmp_path_factory: pytest.TempPathFactory, browser: Browser
) -> Iterator[SharedServer]:
    shared = SharedServer(tmp_path_factory)
    yield shared
    shared.stop()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Iterator[None]:
    report = yield
    if report.failed:
        item.stash[_FAILED] = True
    return report


@pytest.fixture
def server(shared_server: SharedServer, request: pytest.FixtureRequest) -> Iterator[Server]:
    """A server without runs. After a failed test another one takes its place."""
    server = shared_server.get()
    yield server
    # pytest shows it where the test failed
    log = server.log.read_text()[-4000:]
    sys.stdout.write(f"server: exit code {server.process.poll()}\n{log}\n")
    if _FAILED in request.node.stash:
        shared_server.stop()
    else:
        shared_server.end_of_test()


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
        page.set_default_timeout(60_000)
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
