"""Record the traceback of a fatal signal, such as SIGABRT of a native library."""

from __future__ import annotations

import faulthandler
import logging
import os
import re
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from stepscope.common.files import open_for_append, open_regular_file
from stepscope.run.folder import rank_file

log = logging.getLogger(__name__)

TRACEBACK_FILE = "traceback.txt"


@contextmanager
def fatal_signals_recorded(folder: Path, rank: int) -> Iterator[None]:
    """Write tracebacks of fatal signals into the folder, unless faulthandler is in use."""
    path = folder / rank_file(TRACEBACK_FILE, rank)
    try:
        descriptor = None if faulthandler.is_enabled() else open_for_append(path)
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
    """Return the signal of a rank's traceback, such as "Segmentation fault"; None without one."""
    with suppress(OSError):
        path = folder / rank_file(TRACEBACK_FILE, rank)
        with open(open_regular_file(path), "rb") as file:
            found = re.match(rb"Fatal Python error: ([A-Za-z -]{1,40})\n", file.readline(100))
            return None if found is None else found[1].decode()
    return None
