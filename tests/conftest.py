"""Options and checks that all tiers share; `tests/README.md` says what each tier proves."""

from __future__ import annotations

import atexit
import fcntl
import importlib
import importlib.util
import os
import shutil
import signal
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.families import SLOW_FILES

# Before a test imports it: its assertions show their values too.
pytest.register_assert_rewrite("tests.support")

if importlib.util.find_spec("hypothesis"):  # a machine that runs only tests/gpu may not have it
    settings = importlib.import_module("hypothesis").settings
    # The same examples on every machine, and however long a busy one takes for them.
    settings.register_profile("stepscope", derandomize=True, deadline=None, database=None)
    # make explore: others each time. An example that fails becomes an @example of its test.
    settings.register_profile("explore", deadline=None, max_examples=2000)
    settings.load_profile("stepscope")

# Tests run beside each other: threads of OpenMP that wait for their turn would hold all of them up.
os.environ.setdefault("OMP_NUM_THREADS", "1")

pytest_plugins = ["tests.support.suite", "tests.support.process_state"]

Need = Callable[[str | None], None]

TESTS = Path(__file__).parent

# Without these Chromium looks up its maker's hosts, and a container gives it no sandbox.
CHROMIUM_ARGS = [
    *("--no-sandbox", "--disable-gpu", "--disable-background-networking", "--no-first-run"),
    *("--disable-component-update", "--disable-sync", "--disable-quic"),
]


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--require-gpu", action="store_true", help="fail, not skip, the tests that need a GPU"
    )


def pytest_configure() -> None:
    """Give each worker of pytest-xdist simulated GPUs of its own (simulator/).

    Their file is new: other tests that run on this machine have others. No test may run the command
    that the developer's own alerts.toml names, or replace the files of the developer's servers.
    """
    state = tempfile.mkdtemp(prefix="state-")
    atexit.register(shutil.rmtree, state, ignore_errors=True)
    os.environ["XDG_STATE_HOME"] = state
    rules = Path(state, "alerts.toml")
    rules.touch(0o600)
    os.environ["STEPSCOPE_ALERTS"] = str(rules)
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # a job in the background ignores it
        signal.signal(signal.SIGINT, signal.default_int_handler)
    if importlib.util.find_spec("cudasim"):
        machine = tempfile.mkdtemp(prefix="cudasim-", dir="/dev/shm")
        os.environ["CUDASIM_SHM"] = f"{machine}/gpus"
        atexit.register(shutil.rmtree, machine, ignore_errors=True)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark what `make test` leaves to other commands, and what may run once only."""
    for item in items:
        file = item.path.relative_to(TESTS)
        tier = file.parts[0]
        if tier in ("gpu", "simulator") or file.name.startswith("test_cuda_"):
            item.add_marker("cuda")
        elif str(file) in SLOW_FILES:
            item.add_marker("slow")
        elif tier in ("unit", "app"):  # no other process, no browser: --reruns is not for them
            item.add_marker(pytest.mark.flaky(reruns=0))


@pytest.hookimpl(wrapper=True, tryfirst=True)  # outside the timeout: a turn may be long in coming
def pytest_runtest_protocol(item: pytest.Item) -> Iterator[None]:
    """Let a test marked `alone` run while the other workers of pytest-xdist wait.

    Each test holds a shared lock while it runs, and one marked `alone` an exclusive lock. The
    lock `turn` makes the others queue behind a test that waits to be alone.
    """
    if "PYTEST_XDIST_WORKER" not in os.environ:
        return (yield)
    kind = fcntl.LOCK_EX if item.get_closest_marker("alone") else fcntl.LOCK_SH
    here = Path(__file__)
    with here.open() as running, here.with_name("README.md").open() as turn:
        fcntl.flock(turn, fcntl.LOCK_EX)
        fcntl.flock(running, kind)
        fcntl.flock(turn, fcntl.LOCK_UN)
        try:
            return (yield)
        finally:
            fcntl.flock(running, fcntl.LOCK_UN)  # a forked child may still have the file open


@pytest.fixture(scope="session")
def need(request: pytest.FixtureRequest) -> Need:
    """Return a function that skips (or fails) the test for a reason; None lets it run."""
    required = request.config.getoption("--require-gpu", default=False)

    def check(reason: str | None) -> None:
        if reason is not None:
            (pytest.fail if required else pytest.skip)(reason)

    return check


@pytest.fixture(scope="session")
def browser() -> Iterator[Any]:
    """Debian's Chromium, one for all tests: Playwright starts once a process.

    Without it a test skips; with STEPSCOPE_REQUIRE_BROWSER=1, as in CI, it fails instead.
    """
    path = shutil.which("chromium") or shutil.which("chromium-browser")
    if path is None:
        message = "no Chromium: install Debian's chromium package"
        if os.environ.get("STEPSCOPE_REQUIRE_BROWSER"):
            pytest.fail(message)
        pytest.skip(message)
    # Imported here: a machine that runs only tests/gpu has no Playwright.
    playwright = pytest.importorskip("playwright.sync_api")
    with playwright.sync_playwright() as session:
        browser = session.chromium.launch(executable_path=path, args=CHROMIUM_ARGS)
        yield browser
        browser.close()
