"""Processes that end with the process that started them, even where that one is killed."""

from __future__ import annotations

import ctypes
import signal
import sys

PR_SET_PDEATHSIG = 1
"""Of linux/prctl.h."""


def killed_with_parent() -> None:
    """Have Linux kill this process when the thread that started it ends; elsewhere do nothing."""
    if sys.platform == "linux":
        # The C library of the process itself; where it is refused each caller has another way.
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
