"""How the processes of one job find one folder on a disk that several hosts share.

All of them look for a link of the same name, made of what the launcher tells them alike. The
first one makes it, and it names the folder; making a link is one step also on a network disk. A
later job of the same name has to have a folder of its own: links are numbered.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import socket
import tempfile
import time
import zlib
from pathlib import Path

import psutil

from stepscope.common.files import is_network_filesystem
from stepscope.run.folder import folder_name
from stepscope.run.process import own_start

LINKS = ".jobs"
"""Folder of the links, among those of the runs."""
WINDOW_S = 60.0
"""The processes of a job are started together, within this time and the clocks' difference."""
ROUNDED_S = 2.0
"""What the start of a process may be wrong by: the system counts it from a whole second."""
TRIES = 100


def meet(
    root: Path,
    name: str,
    job: tuple[str, ...],
    files: tuple[str, ...],
    gathered: float | None = None,
) -> Path:
    """Return the folder of a job under `root`, and make it where this process is the first.

    `job` is the same in all its processes. A folder that has one of `files`, which this process
    would write, is an earlier job's, and so is one that was begun long before this process, or
    before `gathered`: a time in epoch seconds after which all processes of the job began, where
    that is known. Raises OSError, also where the disk knows no links.
    """
    links = root / LINKS
    links.mkdir(parents=True, exist_ok=True)
    key = f"{zlib.crc32(repr(job).encode()):08x}"
    ahead_s = _now_of_disk(links) - time.time()
    oldest = ahead_s + own_start() - WINDOW_S
    if gathered is not None:
        oldest = max(oldest, ahead_s + gathered - ROUNDED_S)
    for number in range(_newest(links, key), _newest(links, key) + TRIES):
        link = links / f"{key}.{number}"
        with contextlib.suppress(FileExistsError):
            tail = f"{key}-{secrets.token_hex(2)}"
            os.symlink(folder_name(time.time(), name, tail), link)
        folder = root / Path(os.readlink(link)).name
        if link.lstat().st_mtime < oldest or any((folder / file).exists() for file in files):
            continue
        folder.mkdir(exist_ok=True)
        return folder
    raise FileExistsError(f"{links}: {TRIES} jobs of this name began at the same time.")


def is_shared(root: Path, address: str | None) -> bool:
    """Say whether rank 0, whose host has this address, writes on the same disk as this process.

    It does on this host, and on a disk that is not known as local. Nobody is asked, and no name
    looked up.
    """
    return _is_here(address) or is_network_filesystem(root)


def _newest(links: Path, key: str) -> int:
    numbers = (path.suffix[1:] for path in links.glob(f"{key}.*"))
    return max((int(number) for number in numbers if number.isdecimal()), default=0)


def _now_of_disk(links: Path) -> float:
    """Return the time by the clock that stamps the files: hosts differ, their disk does not."""
    with tempfile.TemporaryFile(dir=links) as probe:
        return os.fstat(probe.fileno()).st_mtime


def _is_here(address: str | None) -> bool:
    if not address:
        return False
    own = socket.gethostname()
    if address in ("localhost", own) or address.startswith("127.") or address == "::1":
        return True
    if address.split(".")[0] == own.split(".")[0] and not address.replace(".", "").isdecimal():
        return True
    found = (entry.address for entries in psutil.net_if_addrs().values() for entry in entries)
    return address in found
