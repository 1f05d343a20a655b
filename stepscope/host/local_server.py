"""Free ports of this machine, and when a process that was started serves one of them."""

from __future__ import annotations

import contextlib
import socket
import time
from collections.abc import Iterable

import psutil

HOST = "127.0.0.1"
START_S = 60.0  # the page imports torch


def free_port(ports: Iterable[int] = (0,)) -> int | None:
    """Return the first port that a server can bind on 127.0.0.1, or None; 0 is any port."""
    for port in ports:
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind((HOST, port))
            return int(probe.getsockname()[1])
    return None


def wait_until_it_listens(pid: int, port: int) -> bool:
    """Return True once the process itself listens on the port; False if it ends before START_S.

    Another process may bind a free port first, so a connection would not show whose server it is.
    """
    until = time.monotonic() + START_S
    with contextlib.suppress(psutil.Error):
        process = psutil.Process(pid)
        connections = getattr(process, "net_connections", None) or process.connections  # before 6
        while time.monotonic() < until and process.is_running():
            if process.status() == psutil.STATUS_ZOMBIE:
                break
            for each in connections("tcp"):
                if each.status == psutil.CONN_LISTEN and each.laddr.port == port:
                    return True
            time.sleep(0.1)
    return False
