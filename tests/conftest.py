"""Options and checks that all tiers share; `tests/README.md` says what each tier proves."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator

import pytest


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--require-gpu", action="store_true", help="fail, not skip, the tests that need a GPU"
    )


@pytest.fixture(autouse=True)
def no_thread_left() -> Iterator[None]:
    """Fail a test that leaves one of our threads behind."""
    before = set(threading.enumerate())
    yield
    deadline = time.monotonic() + 5
    while time.monotonic() < deadline:
        left = [t.name for t in set(threading.enumerate()) - before if "stepscope" in t.name]
        if not left:
            return
        time.sleep(0.01)
    pytest.fail(f"threads left running: {left}")
