"""Whether this process may send commands to a run."""

from __future__ import annotations

import socket
import time
from pathlib import Path

from stepscope.common.files import is_own_folder, modified_ns, open_regular_file
from stepscope.run import RunInfo, user_name

STORE_NAME = "rank0.sqlite"  # as stepscope.store, whose import takes 0.1 s
CONTACT = ".connected"
"""File in a folder of mirrored runs; its modification time is that of the last answer."""
CONTACT_S = 15.0  # age of the last answer from which a mirrored run accepts no command


def read_only_reason(run: RunInfo) -> str | None:
    """Return why this process must not send commands to a run; None if it may."""
    mirror = run.run_json.get("mirror")
    if mirror is not None:
        if time.time() - modified_ns(run.folder.parent / CONTACT) / 1e9 > CONTACT_S:
            return f"Not connected to {mirror['source']}: read-only until it is connected again."
        reason: str | None = mirror.get("reason")
        return reason
    user = run.run_json.get("user", user_name())
    if user != user_name():
        return f"This run belongs to the user {user}: read-only."
    if not is_own_folder(run.folder):  # run.json of a copy may be changed
        return "The folder of this run belongs to another user: read-only."
    host = run.run_json.get("host")
    if host != socket.gethostname() and is_in_wal_mode(run.folder / STORE_NAME):
        return f"This run belongs to the host {host}: read-only. Its buttons work on a page there."
    return None


def is_in_wal_mode(store: Path) -> bool:
    """Return True unless two hosts may write to this SQLite file, by its header.

    The header has 2 at byte 18 in WAL mode (https://www.sqlite.org/fileformat.html), which the
    recorder uses where `is_network_filesystem` is False.
    """
    try:
        with open(open_regular_file(store), "rb") as file:
            return file.read(20)[18:] != b"\x01\x01"
    except OSError:
        return True
