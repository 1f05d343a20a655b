"""Memory and CPU of this process and its host."""

from __future__ import annotations

import functools
import os
import threading
import time
from collections.abc import Callable

import psutil

from stepscope.host.children import Children
from stepscope.host.kernel_kills import Container, container, own_folder


def own_container() -> Container:
    """Return the memory of this process's cgroup; nothing is known where there is none to see."""
    folder = _own_folder()
    return Container() if folder is None else container(folder)


_own_folder = functools.cache(own_folder)


class HostSource:
    """Reads this process (about 10 us) and its host (about 100 us: ask once a second).

    CPU shares are means since the previous reading, so the first one has none. The CPU time of
    worker processes counts for the host only, their memory in `children`.
    """

    def __init__(
        self,
        *,
        clock: Callable[[], float] = time.monotonic,
        cpu_clock: Callable[[], float] = time.process_time,
        rss: Callable[[], int] | None = None,
        container: Callable[[], Container] = own_container,
    ) -> None:
        self._clock = clock
        self._cpu_clock = cpu_clock
        self._rss = rss if rss is not None else _process_rss()
        self._container = container
        self._children = Children(clock=clock)
        self._peak = 0.0
        self._peak_lock = threading.Lock()  # the training thread resets it
        self._cpu_before: tuple[float, float] | None = None
        self._host_cpu_begun = False

    def process(self) -> dict[str, float]:
        """Read memory (bytes) and CPU (% of one core) of this process."""
        values = {"process/rss": self.resident(), "process/peak_rss": self._peak}
        wall, cpu = self._clock(), self._cpu_clock()
        if self._cpu_before is not None and wall > self._cpu_before[0]:
            share = (cpu - self._cpu_before[1]) / (wall - self._cpu_before[0])
            values["process/cpu"] = 100 * share
        self._cpu_before = wall, cpu
        return values

    def resident(self) -> float:
        """Read memory (bytes) of this process, also for its peak; from any thread."""
        with self._peak_lock:
            rss = float(self._rss())
            self._peak = max(self._peak, rss)
            return rss

    def children(self) -> dict[str, float]:
        """Read memory (bytes) of this process's children, once a second; {} where not known."""
        return self._children.values()

    def host(self) -> dict[str, float]:
        """Read memory (bytes) and CPU (% of all cores) of the host; always from the same thread.

        In a container that may have less than the host, memory is that of the container.
        """
        cpu, (used, total) = psutil.cpu_percent(), self._memory()
        values = {"host/mem_used": float(used), "host/mem_total": float(total)}
        if self._host_cpu_begun:  # the first value of psutil in a thread is always 0
            values["host/cpu"] = cpu
        self._host_cpu_begun = True
        return values

    def _memory(self) -> tuple[int, int]:
        """Return the memory that cannot be had at once, and all that there is to have."""
        host, own = psutil.virtual_memory(), self._container()
        if own.limit is None or own.used is None or own.limit >= host.total:
            return host.total - host.available, host.total
        used = max(0, own.used - (own.idle_cache or 0))
        return min(used, own.limit), own.limit

    def reset_peak(self) -> tuple[float, float]:
        """Set the peak to the memory in use now; return the peak (before, after)."""
        with self._peak_lock:
            before = self._peak
            self._peak = float(self._rss())
            return before, self._peak


def _process_rss() -> Callable[[], int]:
    """Return a reader of this process's resident bytes.

    The file stays open: each of open, read and close gives the GIL away, and beside a training
    the three take 90 us, one read 20.
    """
    page = os.sysconf("SC_PAGE_SIZE")
    statm = _statm(os.getpid())

    def read() -> int:
        return int(os.pread(statm, 200, 0).split()[1]) * page

    return read


@functools.cache
def _statm(pid: int) -> int:
    """Open the file of this process once; a forked child's `pid` is another."""
    return os.open("/proc/self/statm", os.O_RDONLY | os.O_CLOEXEC)
