"""The run folder: name, path, `run.json`, and the process that writes it."""

from __future__ import annotations

import contextlib
import faulthandler
import functools
import json
import logging
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

from stepscope.common.files import atomic_write, open_for_append, open_regular_file

log = logging.getLogger(__name__)

RUN_JSON = "run.json"
TRACEBACK_FILE = "traceback.txt"
SIGTERM = "SIGTERM"
_RUN_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}")


class RunError(Exception):
    """A run folder that cannot be used; the message is one sentence with a remedy."""


def new_run_folder(root: Path, name: str) -> Path:
    """Create and return an empty run folder under `root`, unique to the caller. Raises OSError."""
    folder = root / folder_name(time.time(), name, secrets.token_hex(4))
    root.mkdir(parents=True, exist_ok=True)
    folder.mkdir()
    return folder


def folder_name(started: float, name: str, tail: str) -> str:
    """Return the name of a run's folder: its start in UTC, its name as a-z and 0-9, `tail`."""
    stamp = time.strftime("%Y%m%d-%H%M%SZ", time.gmtime(started))
    slug = re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-")[:40] or "run"
    return f"{stamp}-{slug}-{tail}"


def is_run_id(text: str) -> bool:
    """Return True if `text` has the form of a run folder's name."""
    return _RUN_ID.fullmatch(text) is not None


def run_folder(root: Path, run_id: str) -> Path:
    """Return the folder of a run. Raises RunError for a path or an unknown run."""
    folder = root / run_id
    if not _RUN_ID.fullmatch(run_id) or not is_in(folder, root):
        raise RunError(f"run: must be the name of a run folder, got {run_id[:120]!r}.")
    if not os.path.isfile(folder / RUN_JSON):  # False where it cannot be read
        check_readable(root)
        if os.path.isdir(folder):
            check_readable(folder)
        raise RunError(f"run: no run {run_id!r} in {root}. 'stepscope runs' lists all runs.")
    return folder


def is_in(folder: Path, root: Path) -> bool:
    """Return True if `folder` is a child of `root`, links followed."""
    return os.path.dirname(os.path.realpath(folder)) == os.path.realpath(root)


def run_folders(root: Path, name: str = RUN_JSON) -> Iterator[Path]:
    """Yield the folders under `root` with a regular file `name`, newest name first.

    Also yields folders that cannot be entered, and nothing if `root` is missing. Raises RunError if
    `root` cannot be read.
    """
    try:
        names = sorted(filter(is_run_id, os.listdir(root)), reverse=True)
    except FileNotFoundError:
        return
    except OSError as error:
        raise RunError(_unreadable(root, error)) from error
    for folder in names:
        try:
            found = stat.S_ISREG(os.stat(root / folder / name).st_mode)
        except PermissionError:
            found = True
        except (OSError, ValueError):
            found = False
        if found:
            yield root / folder


def check_readable(root: Path) -> None:
    """Raise RunError if a folder of runs cannot be read, or is missing and not the default."""
    try:
        os.scandir(root).close()
        os.stat(f"{root}/.")  # PermissionError: its files cannot be opened
    except FileNotFoundError:
        if root != Path("runs").absolute():
            text = f"runs: no folder {root}. Correct the path, or record the first run there."
            raise RunError(text) from None
    except OSError as error:
        raise RunError(_unreadable(root, error)) from error


def _unreadable(root: Path, error: OSError) -> str:
    return f"runs: {root} cannot be read ({error.strerror}). Name a folder that you can read."


def runs_root(runs: Path | None = None) -> Path:
    """Return the absolute folder of all runs: `runs`, else STEPSCOPE_RUNS, else ./runs."""
    return (runs or Path(os.environ.get("STEPSCOPE_RUNS") or "runs")).absolute()


def write_run_json(
    folder: Path, run_json: Mapping[str, Any], name: str = RUN_JSON, *, durable: bool = True
) -> None:
    """Replace the run.json of a run, or of one of its ranks. Raises OSError."""
    atomic_write(folder / name, json.dumps(run_json, indent=1), durable=durable)


def rank_json(rank: int) -> str:
    """Return the name of a rank's run metadata file."""
    return RUN_JSON if rank == 0 else f"rank{rank}.json"


def rank_file(name: str, rank: int) -> str:
    """Return the name of a rank's own file: output.log of rank 1 is output.rank1.log."""
    stem, _, ending = name.rpartition(".")
    return name if rank == 0 else f"{stem}.rank{rank}.{ending}"


def process_identity(pid: int | None = None) -> dict[str, Any]:
    """Return what identifies a process, by default this one, in run.json; also in a container."""
    pid = os.getpid() if pid is None else pid
    return {
        "host": socket.gethostname(),
        "pid": pid,
        "pid_ticks": start_ticks(pid),
        "pid_namespace": pid_namespace(),
        "user": user_name(),
    }


@functools.cache
def pid_namespace() -> str | None:
    """Return a name of this pid namespace, unique among all hosts; None if unknown."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot}/{Path('/proc/self/ns/pid').stat().st_ino}"
    except OSError:  # hidden in a container
        return None


@functools.cache
def user_name() -> str:
    """Return the login name of this process's user, or the user id without one."""
    try:
        return pwd.getpwuid(os.getuid()).pw_name
    except KeyError:  # in a container
        return str(os.getuid())


def start_ticks(pid: int) -> int | None:
    """Return the start time of a process in clock ticks since the boot; None if unknown."""
    try:
        return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19])
    except (OSError, IndexError, ValueError):  # gone, or hidden in a container
        return None


def is_here(identity: Mapping[str, Any]) -> bool:
    """Return True if a process of `process_identity`, if alive, can be seen from here."""
    if identity.get("host") != socket.gethostname() or pid_namespace() is None:
        return False
    return identity.get("pid_namespace") == pid_namespace()


def process_of(run_json: Mapping[str, Any]) -> psutil.Process | None:
    """Return the process that writes a run; None if it has exited or cannot be seen from here."""
    pid, ticks = run_json.get("pid"), run_json.get("pid_ticks")
    # Pids are reused: an equal start (10 ms clock) identifies the process.
    if not is_here(run_json) or type(pid) is not int or start_ticks(pid) != ticks or ticks is None:
        return None
    try:
        process = psutil.Process(pid)
        return process if process.status() != psutil.STATUS_ZOMBIE else None
    except psutil.Error:
        return None


def recorder_of(run_json: Mapping[str, Any], file: Path) -> psutil.Process | None:
    """Return the process of run.json if it is this user's and writes to `file`, or None."""
    process = process_of(run_json)
    with contextlib.suppress(psutil.Error):
        if (
            process is not None
            and process.uids().real == os.getuid()
            and _writes(process.pid, file)
            and process.is_running()  # the pid belonged to this process at each check
        ):
            return process
    return None


def not_signaled(process: psutil.Process, file: Path) -> str:
    """Return why a process was sent no signal, and the command that ends it."""
    return (
        f"Process {process.pid} was sent no signal: it does not have {file.name} of this folder "
        f"open for writing. If it is the right one, end it by: kill -9 {process.pid}."
    )


def _writes(pid: int, file: Path) -> bool:
    """Return True if a process has this regular file (device, inode) open for writing."""
    try:
        status = file.lstat()
        descriptors = os.listdir(f"/proc/{pid}/fd")
    except OSError:
        return False
    if not stat.S_ISREG(status.st_mode) or status.st_nlink != 1:
        return False
    for descriptor in descriptors:
        with contextlib.suppress(OSError, IndexError, ValueError):  # closed meanwhile
            if os.path.samestat(os.stat(f"/proc/{pid}/fd/{descriptor}"), status):
                info = Path(f"/proc/{pid}/fdinfo/{descriptor}").read_text()
                flags = int(info.partition("flags:")[2].split()[0], 8)
                if flags & os.O_ACCMODE != os.O_RDONLY:
                    return True
    return False


_recorded: set[signal.Signals] = set()
"""SIGSEGV while faulthandler is enabled for a run, SIGTERM while its stack is recorded."""


@contextlib.contextmanager
def fatal_signals_recorded(folder: Path, rank: int) -> Iterator[None]:
    """Write the stack at a fatal signal or SIGTERM into the folder, unless the script handles it.

    SIGTERM is recorded where it ends the process, in C: it ends as soon as without Stepscope, and
    `signal.getsignal` returns the same.
    """
    path = folder / rank_file(TRACEBACK_FILE, rank)
    try:
        descriptor = open_for_append(path)
    except OSError as error:
        log.warning("stepscope: fatal signals will not be recorded: %s", error)
        yield
        return
    # The frames of other threads change while they run, which would end the process by SIGSEGV.
    if not faulthandler.is_enabled():
        faulthandler.enable(descriptor, all_threads=False)
        _recorded.add(signal.SIGSEGV)
    if signal.getsignal(signal.SIGTERM) is signal.SIG_DFL:
        faulthandler.register(signal.SIGTERM, descriptor, all_threads=False, chain=True)
        _recorded.add(signal.SIGTERM)
    try:
        yield
    finally:
        _stop_recording()
        with contextlib.suppress(OSError):
            os.close(descriptor)  # unless the script has
            if path.lstat().st_size == 0:
                path.unlink()


def _stop_recording() -> None:
    """Restore the default actions, unless the script has its own handler of SIGTERM now."""
    if signal.SIGSEGV in _recorded:
        faulthandler.disable()
    if signal.SIGTERM in _recorded and signal.getsignal(signal.SIGTERM) is signal.SIG_DFL:
        faulthandler.unregister(signal.SIGTERM)
    _recorded.clear()


# A child, such as a DataLoader worker that its parent terminates, is not the recorded process.
os.register_at_fork(after_in_child=_stop_recording)


def fatal_signal(folder: Path, rank: int) -> str | None:
    """Return SIGTERM, or the name of a fatal signal, that has ended a rank; None without one."""
    with contextlib.suppress(OSError):
        with open(open_regular_file(folder / rank_file(TRACEBACK_FILE, rank)), "rb") as file:
            line = file.readline(100)
        if line.startswith(b"Stack (most recent call first)"):  # faulthandler's of one thread
            return SIGTERM
        found = re.match(rb"Fatal Python error: ([A-Za-z -]{1,40})\n", line)
        return None if found is None else found[1].decode()
    return None
