"""Limits of a process that parses an untrusted file."""

from __future__ import annotations

import fcntl
import os
import resource
import select

NICENESS = 10


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
