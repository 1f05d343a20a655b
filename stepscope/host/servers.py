"""Running dashboard servers of this user, each in a file that only this user can read."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import socket
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TextIO


@dataclass(frozen=True, slots=True)
class RunningServer:
    """A server of this user on this host. `url` contains its token."""

    url: str
    pid: int


def running_servers() -> list[RunningServer]:
    """Return the running servers of this user on this host; remove the files of ended ones."""
    servers = []
    for path in servers_folder().glob("*.json"):
        # Incomplete: another process writes it.
        with contextlib.suppress(OSError, ValueError, TypeError), path.open("r+") as file:
            server = RunningServer(**json.load(file))
            if _take(file):
                path.unlink()
            else:
                servers.append(server)
    return servers


@contextlib.contextmanager
def published_server(port: int, url: str) -> Iterator[None]:
    """Keep a locked file of this process's server during the block. Raises OSError."""
    folder = servers_folder()
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    folder.chmod(0o700)
    running_servers()  # removes the files of servers that were killed
    path = folder / f"{port}.json"
    path.unlink(missing_ok=True)
    # Exclusively: a planted link never receives the token.
    with open(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
        _take(file)
        json.dump(asdict(RunningServer(url, os.getpid())), file)
        file.flush()
        try:
            yield
        finally:
            path.unlink(missing_ok=True)


def servers_folder() -> Path:
    """Return the folder of this host's servers, as several hosts may share the home folder."""
    state = os.environ.get("XDG_STATE_HOME") or Path.home() / ".local" / "state"
    return Path(state) / "stepscope" / "servers" / socket.gethostname()


def _take(file: TextIO) -> bool:
    """Lock a file until it is closed, or the process ends; return False if another has it."""
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return False
    return True
