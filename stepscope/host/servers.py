"""Running dashboard servers of this user, each in a file that only this user can read."""

from __future__ import annotations

import contextlib
import json
import os
import socket
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

import psutil


@dataclass(frozen=True, slots=True)
class RunningServer:
    """A server of this user on this host. `url` contains its token."""

    url: str
    pid: int
    pid_started: float


def running_servers() -> list[RunningServer]:
    """Return the running servers of this user on this host; remove the files of ended ones."""
    servers = []
    for path in servers_folder().glob("*.json"):
        with contextlib.suppress(OSError, ValueError, TypeError):  # another process writes it
            server = RunningServer(**json.loads(path.read_text()))
            if _is_running(server):
                servers.append(server)
            else:
                path.unlink()
    return servers


@contextlib.contextmanager
def published_server(port: int, url: str) -> Iterator[None]:
    """Keep a file of this process's server during the block. Raises OSError."""
    folder, pid = servers_folder(), os.getpid()
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    folder.chmod(0o700)
    running_servers()  # removes the files of servers that were killed
    path = folder / f"{port}.json"
    path.unlink(missing_ok=True)
    server = RunningServer(url, pid, psutil.Process(pid).create_time())
    # Exclusively: a planted link never receives the token.
    with open(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
        json.dump(asdict(server), file)
    try:
        yield
    finally:
        path.unlink(missing_ok=True)


def servers_folder() -> Path:
    """Return the folder of this host's servers, as several hosts may share the home folder."""
    state = os.environ.get("XDG_STATE_HOME") or Path.home() / ".local" / "state"
    return Path(state) / "stepscope" / "servers" / socket.gethostname()


def _is_running(server: RunningServer) -> bool:
    try:
        return bool(psutil.Process(server.pid).create_time() == server.pid_started)
    except psutil.Error:
        return False
