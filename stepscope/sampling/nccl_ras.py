"""Asks NCCL's RAS service on this host what it knows of a job; short, and from no training thread.

RAS listens on localhost, port 28028, or where NCCL_RAS_ADDR says, since NCCL 2.24: threads of its
own answer, so that a question neither waits for the training nor slows it. The protocol is lines of
text: `CLIENT PROTOCOL n`, `TIMEOUT s`, `SET FORMAT json` (since 2.28.7), `VERBOSE STATUS`; then it
closes the connection. What it says is judged by `stepscope/diagnosis/ras.py`.
"""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Mapping

DEFAULT = ("localhost", 28028)
PROTOCOL = 2
LEG_S = 2
"""How long RAS waits for a process that does not answer it; 5 s where it is not told."""
ANSWER_LIMIT = 2**20
"""Bytes of an answer that are read; a job of 512 ranks has some 300 KB of JSON."""
LINE_LIMIT = 1024


class RasError(Exception):
    """RAS did not answer; the message is a short sentence."""


def address(environ: Mapping[str, str] = os.environ) -> tuple[str, int] | None:
    """Return where RAS listens; None where it is switched off or its address is none.

    >>> address({"NCCL_RAS_ADDR": "127.0.0.1:12345"})
    ('127.0.0.1', 12345)
    """
    if environ.get("NCCL_RAS_ENABLE", "1").strip() == "0":
        return None
    given = environ.get("NCCL_RAS_ADDR", "").strip()
    if not given:
        return DEFAULT
    host, _, port = given.rpartition(":")
    if not host or not port.isdecimal() or not 0 < int(port) < 65536:
        return None
    return host.strip("[]"), int(port)


def ask(where: tuple[str, int], timeout_s: float = 4.0) -> str:
    """Return RAS's answer, as JSON where it can; raises RasError. Takes `timeout_s` at most."""
    deadline = time.monotonic() + timeout_s
    try:
        with socket.create_connection(where, timeout=min(1.0, timeout_s)) as connection:
            said = _command(connection, f"CLIENT PROTOCOL {PROTOCOL}", deadline)
            if not said.upper().startswith("SERVER PROTOCOL "):
                raise RasError("another program answers on the port of NCCL RAS")
            _command(connection, f"TIMEOUT {LEG_S}", deadline)
            _command(connection, "SET FORMAT json", deadline)  # an older one says ERROR: text then
            connection.sendall(b"VERBOSE STATUS\n")
            return _all(connection, deadline)
    except TimeoutError as error:
        raise RasError(f"no answer within {timeout_s:g} s") from error
    except OSError as error:
        raise RasError(f"no connection ({error.strerror or type(error).__name__})") from error


def _command(connection: socket.socket, command: str, deadline: float) -> str:
    """Send a command; return the line that answers it."""
    connection.sendall(command.encode() + b"\n")
    line = b""
    while not line.endswith(b"\n"):
        part = _receive(connection, 1, deadline)  # no byte of what follows the line
        line += part
        if not part or len(line) > LINE_LIMIT:
            raise RasError("the answer ended early, or is no line")
    return line.decode("utf-8", "replace").strip()


def _all(connection: socket.socket, deadline: float) -> str:
    parts, size = [], 0
    while part := _receive(connection, 65536, deadline):
        size += len(part)
        if size > ANSWER_LIMIT:
            raise RasError(f"the answer has more than {ANSWER_LIMIT} bytes")
        parts.append(part)
    return b"".join(parts).decode("utf-8", "replace")


def _receive(connection: socket.socket, size: int, deadline: float) -> bytes:
    left_s = deadline - time.monotonic()
    if left_s <= 0:
        raise TimeoutError
    connection.settimeout(left_s)
    return connection.recv(size)
