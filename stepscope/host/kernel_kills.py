"""How many processes the kernel has killed for lack of memory, and how full the container is.

Page cache that was not read lately counts as used, and goes when memory is needed.

The counter is that of the process's own control group (cgroup), a container's as a rule; a kill
anywhere below it counts. Outside of Linux, and where the files are hidden, nothing is known.
"""

from __future__ import annotations

import contextlib
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path("/sys/fs/cgroup")
_NO_LIMIT = 2**60
"""Version 1 writes a number of pages near 2**63 where there is no limit."""


@dataclass(frozen=True, slots=True)
class Container:
    """The memory of a cgroup; bytes. None is no limit, or not known.

    `idle_cache` is the part of `used` that the kernel gives up first: files not read lately.
    """

    limit: int | None = None
    used: int | None = None
    kills: int | None = None
    idle_cache: int | None = None

    def within(self, free: int) -> int:
        """Return how many of the host's free bytes a process in this container can have."""
        if self.limit is None or self.used is None:
            return free
        return min(free, max(0, self.limit - self.used + (self.idle_cache or 0)))


def container(folder: Path | None = None) -> Container:
    """Read the cgroup of this process, or the one in `folder`."""
    folder = own_folder() if folder is None else folder
    if folder is None:
        return Container()
    limit = _number(folder / "memory.max", folder / "memory.limit_in_bytes")
    used = _number(folder / "memory.current", folder / "memory.usage_in_bytes")
    kills = _counter("oom_kill", folder / "memory.events", folder / "memory.oom_control")
    stat = folder / "memory.stat"
    cache = _counter("total_inactive_file", stat)  # version 1 has the folders below in this one
    idle = cache if cache is not None else _counter("inactive_file", stat)
    return Container(None if limit is None or limit >= _NO_LIMIT else limit, used, kills, idle)


def own_folder(root: Path = ROOT, told: Path = Path("/proc/self/cgroup")) -> Path | None:
    """Return the folder of this process's memory cgroup; None where there is none to see."""
    try:
        lines = told.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError):
        return None
    for line in lines:
        _, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        if controllers and "memory" not in controllers.split(","):
            continue
        base = root / "memory" if controllers else root
        # In a container the path may be the host's: the container's own lies at the root then.
        for folder in (base / path.lstrip("/"), base):
            if any((folder / name).is_file() for name in ("memory.events", "memory.oom_control")):
                return folder
    return None


def first_count() -> dict[str, Any] | None:
    """Return what run.json keeps of the counter at a run's start; None where it is not known."""
    folder = own_folder()
    found = container(folder) if folder is not None else Container()
    if found.kills is None:
        return None
    return {"folder": str(folder), "count": found.kills, "booted": _booted()}


def kills_since(first: Any) -> int | None:
    """Return the kills since `first_count` gave this, on the same machine; None if not known."""
    if not isinstance(first, dict):
        return None
    folder, count = first.get("folder"), first.get("count")
    if type(count) is not int or not isinstance(folder, str) or first.get("booted") != _booted():
        return None
    path = Path(folder)
    if not path.is_relative_to(ROOT) or ".." in path.parts:
        return None
    now = container(path).kills
    return None if now is None else max(0, now - count)


def _booted() -> str | None:
    """Return what names this boot of the machine: counters begin anew with each."""
    with contextlib.suppress(OSError):
        return Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
    return None


def _number(*paths: Path) -> int | None:
    for path in paths:
        text = _text(path).strip()
        if text.isdecimal():
            return int(text)
    return None


def _counter(wanted: str, *paths: Path) -> int | None:
    for path in paths:
        for line in _text(path).splitlines():
            name, _, value = line.partition(" ")
            if name == wanted and value.strip().isdecimal():
                return int(value)
    return None


def _text(path: Path) -> str:
    with contextlib.suppress(OSError, UnicodeDecodeError):
        number = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        with open(number, encoding="ascii") as file:
            return file.read(16_384)
    return ""
