"""A real server, and tabs whose consoles are watched."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator

import pytest
from playwright.sync_api import Browser, ConsoleMessage, Page, expect

from tests.support.server import ARTIFACTS, Server
from tests.support.shared_server import SharedServer

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
