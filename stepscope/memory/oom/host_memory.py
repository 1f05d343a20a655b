"""The memory of the host, the container and this process at a failure."""

from __future__ import annotations

import os
import shutil
from typing import Any

import psutil

from stepscope.host.kernel_kills import container, kills_since
from stepscope.memory.oom.record import Host


def host_memory(first_kills: Any = None) -> Host:
    """Read it now; `first_kills` is what run.json has of the kernel's counter at the start."""
    memory, found = psutil.virtual_memory(), container()
    process = psutil.Process()
    return Host(
        total=int(memory.total),
        available=int(memory.available),
        process=int(process.memory_info().rss),
        children=_children(process),
        limit=found.limit,
        limit_used=found.used,
        kills=kills_since(first_kills),
        shared_free=_shared_free(),
    )


def _children(process: psutil.Process) -> int | None:
    total = 0
    try:
        for child in process.children(recursive=True):
            try:
                total += child.memory_info().rss
            except psutil.Error:  # it has just ended
                continue
    except psutil.Error:
        return None
    return total


def _shared_free() -> int | None:
    """Return the free bytes of the shared memory that DataLoader's workers send batches through."""
    try:
        return shutil.disk_usage("/dev/shm").free if os.path.isdir("/dev/shm") else None
    except OSError:
        return None
