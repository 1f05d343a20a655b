"""End this process with its parent, even if the parent is killed, and limit what it may use."""

from __future__ import annotations

import contextlib
import ctypes
import os
import resource
import signal
import threading
from collections.abc import Callable

PR_SET_PDEATHSIG = 1  # linux/prctl.h
NICENESS = 10  # of a process that parses an untrusted file


def set_parent_death_signal() -> None:
    """Have Linux kill this process when the thread that started it ends."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


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


def limit_process(*, memory: int, cpu_s: int, file_bytes: int) -> None:
    """Limit this process's address space, CPU time and size of files; no core dump."""
    limits = {
        resource.RLIMIT_AS: memory,
        resource.RLIMIT_CPU: cpu_s,
        resource.RLIMIT_FSIZE: file_bytes,
        resource.RLIMIT_CORE: 0,
    }
    for limit, value in limits.items():
        hard = resource.getrlimit(limit)[1]
        value = value if hard == resource.RLIM_INFINITY else min(value, hard)
        resource.setrlimit(limit, (value, hard))
    os.nice(NICENESS)
