"""Which process writes a run: run.json names it, and readers look whether it still runs."""

from __future__ import annotations

import functools
import os
import pwd
import socket
from pathlib import Path
from typing import Any

import psutil


def process_identity() -> dict[str, Any]:
    """Return the entries of run.json that identify this process and its user.

    Containers may have the same host name and the same process numbers. So `pid` identifies a
    process only together with `pid_namespace`, which is None on systems without namespaces.
    """
    return {
        "host": socket.gethostname(),
        "pid": os.getpid(),
        "pid_started": own_start(),
        "pid_namespace": pid_namespace(),
        "user": user_name(),
    }


@functools.cache
def pid_namespace() -> str | None:
    """Return a name of this process's pid namespace that is unique among all machines."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot}/{Path('/proc/self/ns/pid').stat().st_ino}"
    except OSError:  # not Linux, or a /proc that is hidden
        return None


@functools.cache
def user_name() -> str:
    """Return the login name of this process's user, or its number where it has no name."""
    try:
        return pwd.getpwuid(os.getuid()).pw_name
    except KeyError:  # a container may run under a number that no passwd file knows
        return str(os.getuid())


@functools.cache
def _start_of(pid: int) -> float:
    return float(psutil.Process(pid).create_time())


def own_start() -> float:
    """Return when this process began, in epoch seconds."""
    return _start_of(os.getpid())  # by pid, so that a forked child asks for its own


def start_above(mark: str) -> float | None:
    """Return when the nearest process above this one began that has no variable `mark`.

    That is the launcher which sets it, also where a shell of the user stands between; in epoch
    seconds, None where it cannot be seen.
    """
    try:
        for process in psutil.Process().parents():
            if mark not in process.environ():
                return float(process.create_time())
    except (psutil.Error, OSError):
        pass
    return None


def process_of(run_json: dict[str, Any]) -> psutil.Process | None:
    """Return the process that writes a run of this host, if it still runs."""
    try:
        process = psutil.Process(int(run_json["pid"]))
        # A process number is used again; the same start time (10 ms clock) is the same process.
        same = abs(process.create_time() - float(run_json["pid_started"])) < 1.0
        return process if same and process.status() != psutil.STATUS_ZOMBIE else None
    except (psutil.Error, KeyError, ValueError, TypeError, OverflowError):
        return None
