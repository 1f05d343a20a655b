"""Memory and CPU of this process, its children, its container (cgroup) and its host."""

from __future__ import annotations

import contextlib
import functools
import os
import sys
import threading
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

ROOT = Path("/sys/fs/cgroup")


@dataclass(frozen=True, slots=True)
class CgroupMemory:
    """Memory of a cgroup in bytes; None without a limit, or unknown as of cgroup v1.

    `idle_cache` is the part of `used` that the kernel reclaims first: inactive files.
    """

    limit: int | None = None
    used: int | None = None
    idle_cache: int = 0

    def within(self, free: int) -> int:
        """Return the bytes available in this container, of `free` bytes of the host."""
        if self.limit is None or self.used is None:
            return free
        return min(free, max(0, self.limit - self.used + self.idle_cache))


def container(folder: Path | None = None) -> CgroupMemory:
    """Read the cgroup of this process, or the one in `folder`; all None if it is not visible.

    Slurm and systemd set the limit of a job or slice on an ancestor: limit and use are those of the
    level with the fewest available bytes.
    """
    folder = own_folder() if folder is None else folder
    if folder is None:
        return CgroupMemory()
    levels = map(_level, (folder, *folder.parents))
    return min(levels, key=lambda level: level.within(sys.maxsize))


def _level(folder: Path) -> CgroupMemory:
    """Read one cgroup; all None without a limit, because the kernel adds up `memory.stat`."""
    limit = _text(folder / "memory.max").strip()
    used = _text(folder / "memory.current").strip()
    if not limit.isdecimal() or not used.isdecimal():
        return CgroupMemory()
    cache = _counter(folder / "memory.stat", "inactive_file")
    return CgroupMemory(int(limit), int(used), cache or 0)


@functools.cache
def own_folder(root: Path = ROOT, table: Path = Path("/proc/self/cgroup")) -> Path | None:
    """Return the folder of this process's cgroup; None if it is not visible."""
    for line in _text(table).splitlines():
        if line.startswith("0::"):
            # In a container the path may be the host's: then the container's cgroup is the root.
            for folder in (root / line[3:].lstrip("/"), root):
                if (folder / "memory.events").is_file():
                    return folder
    return None


def first_count() -> dict[str, Any] | None:
    """Return the OOM kill counter at a run's start for run.json; None if unknown."""
    folder = own_folder()
    kills = None if folder is None else _kills(folder)
    return None if kills is None else {"folder": str(folder), "count": kills}


def kills_since(first: Any) -> int | None:
    """Return the OOM kills since `first_count` on the same host; None if unknown."""
    if not isinstance(first, dict):
        return None
    folder, count = first.get("folder"), first.get("count")
    if type(count) is not int or not isinstance(folder, str):
        return None
    path = Path(folder)
    if not path.is_relative_to(ROOT) or ".." in path.parts:
        return None
    now = _kills(path)
    return None if now is None else max(0, now - count)


def _kills(folder: Path) -> int | None:
    return _counter(folder / "memory.events", "oom_kill")


def _counter(path: Path, key: str) -> int | None:
    for line in _text(path).splitlines():
        name, _, value = line.partition(" ")
        if name == key and value.strip().isdecimal():
            return int(value)
    return None


def _text(path: Path | str) -> str:
    """Return the content of a file of the kernel; "" if its process has exited."""
    with contextlib.suppress(OSError):
        return Path(path).read_bytes().decode(errors="replace")
    return ""


OWN_STARTERS = ("stepscope-code", "stepscope-alerts")  # Threads whose children are Stepscope's.
REST = 200  # Cooldown in multiples of a reading's duration: 0.5% of the sampler's thread.


def children_memory() -> int | None:
    """Return the bytes that only the script's child processes and theirs have; 0 without any.

    A page that a forked worker shares with this process counts once the worker writes to it, as
    Python does when it counts a reference: resident memory has it from the start.
    Returns None if the kernel does not list them (CONFIG_PROC_CHILDREN). Children of a native
    thread do not count until the thread ends.
    """
    pid = os.getpid()
    if not os.path.exists(f"/proc/{pid}/task/{pid}/children"):
        return None
    threads = [thread for thread in threading.enumerate() if thread.name not in OWN_STARTERS]
    found = _children((pid, thread.native_id or pid) for thread in threads)
    for child in found:  # grows meanwhile: workers of a fork server are children of a child
        found += _children([(child, child)])
    return sum(map(_private_bytes, found))


def _children(threads: Iterable[tuple[int, int]]) -> list[int]:
    """Return the child processes of these (process, thread) pairs."""
    lists = (_text(f"/proc/{pid}/task/{thread}/children") for pid, thread in threads)
    return [int(pid) for listed in lists for pid in listed.split()]


def _private_bytes(pid: int) -> int:
    with contextlib.suppress(psutil.Error):
        return int(psutil.Process(pid).memory_full_info().uss)
    return 0


MIN_CPU_INTERVAL_S = 0.05
"""Minimum interval of CPU usage: a thread switch between reading the two clocks gave 420% on two
cores."""


class HostSampler:
    """Samples this process (about 20 µs) and its host (about 100 µs: once a second).

    CPU usage is the mean since the previous sample, so the first sample lacks it. The CPU time of
    worker processes counts for the host only, their memory in `children`.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._process = psutil.Process()
        self._next_children = clock()
        self._peak = 0.0
        self._peak_lock = threading.Lock()  # the training thread resets it
        self._cpu_before: tuple[float, float] | None = None
        self._host_cpu_begun = False

    def process(self) -> dict[str, float]:
        """Read memory (bytes) and CPU (% of one core) of this process."""
        values = {"process/rss": self.resident(), "process/peak_rss": self._peak}
        wall, cpu = self._clock(), time.process_time()
        if self._cpu_before is None:
            self._cpu_before = wall, cpu
        elif wall - self._cpu_before[0] >= MIN_CPU_INTERVAL_S:
            share = (cpu - self._cpu_before[1]) / (wall - self._cpu_before[0])
            values["process/cpu"] = 100 * share
            self._cpu_before = wall, cpu
        return values

    def resident(self) -> float:
        """Read memory (bytes) of this process, also for its peak. Thread-safe."""
        with self._peak_lock:
            rss = self._rss()
            self._peak = max(self._peak, rss)
            return rss

    def children(self) -> dict[str, float]:
        """Read memory (bytes) of this process's children; {} during the cooldown, or if unknown."""
        began = self._clock()
        if began < self._next_children:
            return {}
        total = children_memory()
        ended = self._clock()
        self._next_children = ended + REST * (ended - began)
        return {} if total is None else {"process/children_rss": float(total)}

    def host(self) -> dict[str, float]:
        """Read memory (bytes; of a smaller container) and CPU (%) of the host. Not thread-safe."""
        cpu, (used, total) = psutil.cpu_percent(), self._memory()
        values = {"host/mem_used": float(used), "host/mem_total": float(total)}
        if self._host_cpu_begun:  # the first value of psutil in a thread is always 0
            values["host/cpu"] = cpu
        self._host_cpu_begun = True
        return values

    def _memory(self) -> tuple[int, int]:
        """Return used (not available) and total memory in bytes."""
        host, own = psutil.virtual_memory(), container()
        if own.limit is None or own.used is None or own.limit >= host.total:
            return host.total - host.available, host.total
        return min(max(0, own.used - own.idle_cache), own.limit), own.limit

    def reset_peak(self) -> tuple[float, float]:
        """Set the peak to the present memory; return the peak (before, after)."""
        with self._peak_lock:
            before = self._peak
            self._peak = self._rss()
            return before, self._peak

    def _rss(self) -> float:
        return float(self._process.memory_info().rss)
