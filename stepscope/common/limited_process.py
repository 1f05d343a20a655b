"""Limits that a process sets itself before it parses a file of untrusted content."""

from __future__ import annotations

import fcntl
import os
import resource
import select

NICENESS = 10


def limit_process(
    *, memory: int, cpu_s: int, file_bytes: int, counted: int = resource.RLIMIT_AS
) -> None:
    """Limit this process's memory in bytes, its CPU time and each file that it writes.

    `counted` is RLIMIT_AS for all of the address space, or RLIMIT_DATA for the process's own data.
    """
    limits = ((counted, memory), (resource.RLIMIT_CPU, cpu_s), (resource.RLIMIT_FSIZE, file_bytes))
    for what, value in (*limits, (resource.RLIMIT_CORE, 0)):
        soft, hard = resource.getrlimit(what)
        known = [one for one in (soft, hard, value) if one != resource.RLIM_INFINITY]
        resource.setrlimit(what, (min(known), hard))  # one that is lower already stays
    os.nice(NICENESS)


def end_with_stdin() -> None:
    """Have the kernel end this process once stdin ends, which nothing may be written to.

    A thread could not: hashing the content of a hostile file blocks the interpreter for minutes.
    """
    fcntl.fcntl(0, fcntl.F_SETOWN, os.getpid())
    fcntl.fcntl(0, fcntl.F_SETFL, fcntl.fcntl(0, fcntl.F_GETFL) | os.O_ASYNC)  # SIGIO ends it
    if select.select([0], [], [], 0)[0]:
        os._exit(1)
