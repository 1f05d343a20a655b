"""Ends a process together with its parent, even if the parent is killed."""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import sys
import threading
from collections.abc import Callable

PR_SET_PDEATHSIG, PR_SET_CHILD_SUBREAPER = 1, 36  # linux/prctl.h


def set_parent_death_signal() -> None:
    """Have Linux kill this process when the thread that started it ends; no-op elsewhere."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


def adopt_orphans() -> None:
    """Have Linux make this process the parent of its orphaned descendants; no-op elsewhere."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1)


def call_at_end_of(pipe: int, action: Callable[[], object]) -> None:
    """Start a thread that calls `action` when the other end of a pipe is closed."""

    def wait() -> None:
        # Not sys.stdin: a thread that holds its lock while waiting aborts the interpreter at exit.
        while os.read(pipe, 1024):
            pass
        action()

    threading.Thread(target=wait, name="stepscope-parent", daemon=True).start()


def kill_group() -> None:
    """Kill this process and, if it leads a process group, the group."""
    with contextlib.suppress(ProcessLookupError):
        if os.getpgrp() == os.getpid():
            os.killpg(os.getpid(), signal.SIGKILL)
    os._exit(1)
