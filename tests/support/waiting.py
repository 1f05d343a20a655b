"""Waiting for what another thread or process does."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from stepscope.run import RunError
from stepscope.store import StoreError


def wait_until(true: Callable[[], bool], timeout_s: float = 40.0) -> None:
    """Poll until `true()` is true."""
    deadline = time.monotonic() + timeout_s
    while not true():
        assert time.monotonic() < deadline, "timed out"
        time.sleep(0.01)


def wait_for(found: Callable[[], Any], timeout_s: float = 20.0) -> Any:
    """Poll until `found()` is true and return it."""
    deadline = time.monotonic() + timeout_s
    while time.monotonic() < deadline:
        try:
            if result := found():
                return result
        except (OSError, ValueError, RunError, StoreError):
            pass  # the folder is not complete yet
        time.sleep(0.02)
    raise AssertionError("timed out")
