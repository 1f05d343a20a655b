"""Memory of this process's children, such as the workers of a DataLoader, from /proc.

psutil reads the status of every process of the machine to find children. The kernel lists them by
the thread that started them: a reading takes three calls for each of our Python threads, and six
for each child.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterable

DEPTH = 4
"""Generations that are followed: workers of a fork server are the second."""
MOST = 512
"""Children that are looked at: a script may start any number."""
REST = 200
"""Pause after a reading, in multiples of its time: 0.5 % of the sampler's thread."""


class Children:
    """Reads the memory of this process's children; {} while it rests, and where nobody lists them.

    `read` returns their resident bytes, None where they are not known.
    """

    def __init__(
        self,
        *,
        clock: Callable[[], float] = time.monotonic,
        read: Callable[[], int | None] | None = None,
    ) -> None:
        self._clock = clock
        self._read = resident if read is None else read
        self._rests_until = clock()

    def values(self) -> dict[str, float]:
        """Return the bytes by metric key."""
        began = self._clock()
        if began < self._rests_until:
            return {}
        total = self._read()
        ended = self._clock()
        self._rests_until = ended + REST * (ended - began)
        return {} if total is None else {"process/children_rss": float(total)}


def resident() -> int | None:
    """Return the resident bytes of this process's children, and of theirs; 0 where it has none.

    None where the kernel does not list them: without Linux's /proc, or CONFIG_PROC_CHILDREN.
    Children that end meanwhile do not count. Those that native threads started do not count, until
    the thread ends.
    """
    pid = os.getpid()
    if not os.path.exists(f"/proc/{pid}/task/{pid}/children"):
        return None
    threads = {thread.native_id for thread in threading.enumerate() if thread.native_id}
    family = _children((pid, thread) for thread in threads | {pid})
    met, generation = set(family), family
    for _ in range(DEPTH - 1):
        generation = [
            pid for pid in _children((pid, pid) for pid in generation[:MOST]) if pid not in met
        ]
        if not generation or len(met) > MOST:
            break
        met.update(generation)
    return sum(map(_pages, met)) * os.sysconf("SC_PAGE_SIZE")


def _children(threads: Iterable[tuple[int, int]]) -> list[int]:
    """Return the processes that these threads, of (process, thread), have started."""
    lists = (_read(f"/proc/{pid}/task/{thread}/children") for pid, thread in threads)
    return [int(pid) for listed in lists for pid in listed.split()]


def _pages(pid: int) -> int:
    words = _read(f"/proc/{pid}/statm").split()
    return int(words[1]) if len(words) > 1 else 0


def _read(path: str) -> bytes:
    """Return what a file of /proc says, nothing once its process has ended."""
    try:
        file = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return b""
    try:
        return os.read(file, 1 << 16)
    except OSError:
        return b""
    finally:
        os.close(file)
