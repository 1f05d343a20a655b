"""Record the traceback of a fatal signal, such as SIGABRT of a native library."""

from __future__ import annotations

import faulthandler
import logging
import os
import re
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from stepscope.common.files import open_regular_file
from stepscope.common.formatting import printable
from stepscope.run.folder import rank_file

log = logging.getLogger(__name__)

TRACEBACK_FILE = "traceback.txt"
MAX_READ_BYTES = 512 * 1024  # faulthandler writes at most 100 threads of some kilobytes
_SIGNALS = {
    "Aborted": "SIGABRT",
    "Bus error": "SIGBUS",
    "Floating point exception": "SIGFPE",
    "Floating-point exception": "SIGFPE",
    "Illegal instruction": "SIGILL",
    "Segmentation fault": "SIGSEGV",
}
_ERROR = re.compile(rf"^Fatal Python error: ({'|'.join(_SIGNALS)})$", re.MULTILINE)
_FRAME = re.compile(
    r'^Current thread .*\n +File "(.{1,1000})", line (\d{1,9}) in (.{1,200})$', re.MULTILINE
)


@contextmanager
def fatal_signals_recorded(folder: Path, rank: int) -> Iterator[None]:
    """Write tracebacks of fatal signals into the folder, unless faulthandler is in use."""
    path = folder / rank_file(TRACEBACK_FILE, rank)
    flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW | os.O_CLOEXEC
    try:
        descriptor = None if faulthandler.is_enabled() else os.open(path, flags, 0o644)
    except OSError as error:
        log.warning("stepscope: fatal signals will not be recorded: %s", error)
        descriptor = None
    if descriptor is None:
        yield
        return
    faulthandler.enable(descriptor)
    try:
        yield
    finally:
        faulthandler.disable()
        os.close(descriptor)
        with suppress(OSError):
            if path.lstat().st_size == 0:
                path.unlink()


def fatal_signal(folder: Path, rank: int) -> str | None:
    """Return "SIGABRT in nn/conv.py:5 (forward)" for a fatal signal; None without one."""
    try:
        with open(open_regular_file(folder / rank_file(TRACEBACK_FILE, rank)), "rb") as file:
            text = file.read(MAX_READ_BYTES).decode(errors="replace")
    except OSError:
        return None
    error, frame = _ERROR.search(text), _FRAME.search(text)
    if error is None:
        return None
    name = _SIGNALS[error[1]]
    if frame is None:
        return name
    file_name = "/".join(frame[1].split("/")[-3:])
    return f"{name} in {printable(file_name)[-120:]}:{frame[2]} ({printable(frame[3])[:80]})"
