"""The run folder: its name and path, its `run.json`, and the process that writes it."""

from __future__ import annotations

import contextlib
import errno
import functools
import json
import os
import pwd
import re
import secrets
import signal
import socket
import stat
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import psutil

from stepscope.common.files import atomic_write

RUN_JSON = "run.json"
NAME_TRIES = 100
_RUN_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}")


class RunError(Exception):
    """A run folder that cannot be used; the message is one sentence with a remedy."""


def new_run_folder(root: Path, name: str) -> Path:
    """Create and return an empty run folder under `root`, its name from the time and `name`.

    No two callers get the same one, however many start in a second. Raises OSError.
    """
    root.mkdir(parents=True, exist_ok=True)
    for _ in range(NAME_TRIES):
        folder = root / folder_name(time.time(), name, secrets.token_hex(4))
        with contextlib.suppress(FileExistsError):
            folder.mkdir()
            return folder
    raise FileExistsError(errno.EEXIST, f"{NAME_TRIES} names were taken", str(root))


def folder_name(started: float, name: str, tail: str) -> str:
    """Return the name of a run's folder: its start in UTC, its name in plain letters, `tail`."""
    stamp = time.strftime("%Y%m%d-%H%M%SZ", time.gmtime(started))
    slug = re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-")[:40] or "run"
    return f"{stamp}-{slug}-{tail}"


def is_run_id(text: str) -> bool:
    """Say whether this can be the name of a run's folder."""
    return _RUN_ID.fullmatch(text) is not None


def run_folder(root: Path, run_id: str) -> Path:
    """Return the folder of a run named by a user or a URL.

    Raises RunError where the id is not a plain name or there is no such run under `root`.
    """
    folder = root / run_id
    if not _RUN_ID.fullmatch(run_id) or not is_in(folder, root):
        raise RunError(f"run: must be the name of a run folder, got {run_id[:120]!r}.")
    if not os.path.isfile(folder / RUN_JSON):  # False where it cannot be read
        if os.path.isdir(folder) and not os.access(folder, os.X_OK):
            raise RunError(f"run: {folder} cannot be read. Change its permissions.")
        raise RunError(f"run: no run {run_id!r} in {root}. Pick one from the list.")
    return folder


def is_in(folder: Path, root: Path) -> bool:
    """Return True if a folder lies directly in `root`, links followed."""
    return os.path.dirname(os.path.realpath(folder)) == os.path.realpath(root)


def run_folders(root: Path, name: str = RUN_JSON) -> Iterator[Path]:
    """Yield the folders under `root` that have a file `name`, newest name first.

    Older names have local time in them. None where the folders cannot be listed; a folder that
    cannot be read is left out.
    """
    try:
        names = sorted(filter(is_run_id, os.listdir(root)), reverse=True)
    except OSError:
        return
    for found in names:
        if os.path.isfile(root / found / name):  # False where it cannot be read
            yield root / found


def runs_root(runs: Path | None = None) -> Path:
    """Return the absolute folder of all runs: `runs`, else STEPSCOPE_RUNS, else ./runs.

    An empty STEPSCOPE_RUNS counts as not set.
    """
    return (runs or Path(os.environ.get("STEPSCOPE_RUNS") or "runs")).absolute()


def write_run_json(
    folder: Path, run_json: Mapping[str, Any], name: str = RUN_JSON, *, durable: bool = True
) -> None:
    """Replace the run.json of a run, or of one of its ranks. Raises OSError."""
    atomic_write(folder / name, json.dumps(run_json, indent=1), durable=durable)


def rank_json(rank: int) -> str:
    """Return the name of the file in which a rank keeps its own run.json."""
    return RUN_JSON if rank == 0 else f"rank{rank}.json"


def rank_file(name: str, rank: int) -> str:
    """Return the name of a rank's own file: output.log of rank 1 is output.rank1.log."""
    stem, _, ending = name.rpartition(".")
    return name if rank == 0 else f"{stem}.rank{rank}.{ending}"


def process_identity() -> dict[str, Any]:
    """Return the entries of run.json that identify this process and its user.

    Containers may have the same host name and the same process numbers. So `pid` identifies a
    process only together with `pid_namespace`, which is None on systems without namespaces.
    """
    return {
        "host": socket.gethostname(),
        "pid": os.getpid(),
        "pid_started": own_start(),
        "pid_ticks": start_ticks(os.getpid()),
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


def start_ticks(pid: int) -> int | None:
    """Return when a process began in clock ticks since the boot, which no set clock changes."""
    try:
        return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19])
    except (OSError, IndexError, ValueError):  # not Linux, gone, or a /proc that is hidden
        return None


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
        # A process number is used again; the same start time (10 ms clock) is the same process. Its
        # epoch seconds change when somebody sets the clock.
        same = abs(process.create_time() - float(run_json["pid_started"])) < 1.0 or (
            run_json.get("pid_namespace") == pid_namespace() is not None
            and run_json.get("pid_ticks") == start_ticks(process.pid) is not None
        )
        return process if same and process.status() != psutil.STATUS_ZOMBIE else None
    except (psutil.Error, KeyError, ValueError, TypeError, OverflowError):
        return None


def recorder_of(run_json: dict[str, Any], file: Path) -> psutil.Process | None:
    """Return the process of this user that run.json names and that has `file` open for writing.

    Anybody can write a pid into a JSON file, and a copied folder belongs to whoever copies it. An
    open file of the folder itself proves that the process records there: signal no other one.
    """
    process = process_of(run_json)
    with contextlib.suppress(psutil.Error):
        if (
            process is not None
            and process.uids().real == os.getuid()
            and _writes(process.pid, file)
            and process.is_running()  # the number was this process's all the while
        ):
            return process
    return None


def not_signaled(process: psutil.Process, file: Path) -> str:
    """Return why `recorder_of` does not return a process, and what the user can do instead."""
    return (
        f"Process {process.pid} was sent no signal: it does not have {file.name} of this folder "
        f"open for writing. If it is the right one, end it by: kill -9 {process.pid}."
    )


def send_signal(process: psutil.Process, number: signal.Signals) -> None:
    """Send a signal to this process, never to a later one with the same pid.

    Raises psutil.Error or OSError where there is no such process any more.
    """
    try:
        descriptor = os.pidfd_open(process.pid)
    except (AttributeError, OSError):  # Linux before 5.3, a Python built for it, or gone
        process.send_signal(number)
        return
    try:
        if not process.is_running():
            raise psutil.NoSuchProcess(process.pid)
        signal.pidfd_send_signal(descriptor, number)
    finally:
        os.close(descriptor)


def _writes(pid: int, file: Path) -> bool:
    """Return True if a process has a file open for writing, by device and inode.

    A link proves nothing: it may point to any file that the process has open.
    """
    try:
        wanted = file.lstat()
        descriptors = os.listdir(f"/proc/{pid}/fd")
    except OSError:
        return False
    if not stat.S_ISREG(wanted.st_mode) or wanted.st_nlink != 1:
        return False
    for one in descriptors:
        with contextlib.suppress(OSError, IndexError, ValueError):  # closed meanwhile
            if os.path.samestat(os.stat(f"/proc/{pid}/fd/{one}"), wanted):
                info = Path(f"/proc/{pid}/fdinfo/{one}").read_text()
                flags = int(info.partition("flags:")[2].split()[0], 8)
                if flags & os.O_ACCMODE != os.O_RDONLY:
                    return True
    return False
