"""The address of a dashboard server with its token, in a file that only its user can read."""

from __future__ import annotations

import contextlib
import json
import os
import socket
from collections.abc import Iterator
from pathlib import Path


@contextlib.contextmanager
def published_server(port: int, url: str) -> Iterator[None]:
    """Keep a file with the address and the pid of this process during the block. Raises OSError."""
    folder = servers_folder()
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    folder.chmod(0o700)
    path = folder / f"{port}.json"
    withdraw_server(port)  # one that was killed
    # Exclusively: a planted link never receives the token.
    with open(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
        json.dump({"url": url, "pid": os.getpid()}, file)
    try:
        yield
    finally:
        withdraw_server(port)


def withdraw_server(port: int) -> None:
    """Delete the file of a server that ends or has ended. Raises OSError."""
    (servers_folder() / f"{port}.json").unlink(missing_ok=True)


def servers_folder() -> Path:
    """Return the folder of this host's servers, as several hosts may share the home folder."""
    state = os.environ.get("XDG_STATE_HOME") or Path.home() / ".local" / "state"
    return Path(state) / "stepscope" / "servers" / socket.gethostname()
