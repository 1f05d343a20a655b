"""End this process with its parent, even if the parent is killed, and limit what it may use."""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import os
import resource
import select
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


def limit_process(
    *, memory: int, cpu_s: int, file_bytes: int, counted: int = resource.RLIMIT_AS
) -> None:
    """Limit this process's memory (RLIMIT_AS or RLIMIT_DATA), CPU time and size of files."""
    limits = ((counted, memory), (resource.RLIMIT_CPU, cpu_s), (resource.RLIMIT_FSIZE, file_bytes))
    for limit, value in (*limits, (resource.RLIMIT_CORE, 0)):
        soft, hard = resource.getrlimit(limit)
        finite = [number for number in (soft, hard, value) if number != resource.RLIM_INFINITY]
        resource.setrlimit(limit, (min(finite), hard))  # a lower limit stays
    os.nice(NICENESS)


def end_with_stdin() -> None:
    """Let the kernel end this process when stdin closes; hashing may block all its threads."""
    fcntl.fcntl(0, fcntl.F_SETOWN, os.getpid())
    fcntl.fcntl(0, fcntl.F_SETFL, fcntl.fcntl(0, fcntl.F_GETFL) | os.O_ASYNC)  # SIGIO ends it
    if select.select([0], [], [], 0)[0]:
        os._exit(1)
