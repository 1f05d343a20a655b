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

    `counted` says which memory: RLIMIT_AS is all of the address space, RLIMIT_DATA its own data,
    for a process whose libraries alone map gigabytes.
    """
    limits = ((counted, memory), (resource.RLIMIT_CPU, cpu_s), (resource.RLIMIT_FSIZE, file_bytes))
    for what, value in (*limits, (resource.RLIMIT_CORE, 0)):
        soft, hard = resource.getrlimit(what)
        known = [one for one in (soft, hard, value) if one != resource.RLIM_INFINITY]
        resource.setrlimit(what, (min(known), hard))  # one that is lower already stays
    os.nice(NICENESS)


def end_with_stdin() -> None:
    """Have the kernel end this process once stdin ends: with the process that holds its other end.

    Nothing may ever be written to it. No thread could do it: hashing what a hostile file holds
    keeps the interpreter for minutes.
    """
    fcntl.fcntl(0, fcntl.F_SETOWN, os.getpid())
    fcntl.fcntl(0, fcntl.F_SETFL, fcntl.fcntl(0, fcntl.F_GETFL) | os.O_ASYNC)  # SIGIO ends it
    if select.select([0], [], [], 0)[0]:
        os._exit(1)
