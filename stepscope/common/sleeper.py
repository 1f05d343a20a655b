"""A sleep that ends early: when another thread asks for it, or when a folder is touched or a file
takes its place in it.

Waking up to look for work costs a training on the same core 60 to 170 us each time (the GIL changes
hands twice), so the writer thread does not poll where the system can tell it of a change.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import select
import weakref
from pathlib import Path

TOUCHED, REPLACED = 0x4, 0x80
"""IN_ATTRIB and IN_MOVED_TO of <sys/inotify.h>: what of a folder may end a sleep."""


class Sleeper:
    """Lets one thread sleep; `wake` may be called by any thread, also when nobody sleeps.

    `sees_touches` says whether `os.utime(folder)`, by any process, ends the sleep (with REPLACED
    for `change`: a file that is moved into it): a system may be out of inotify instances (128 a
    user by default). Raises OSError where the process may open no more files.
    """

    def __init__(self, folder: Path, change: int = TOUCHED) -> None:
        self._asked = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        # Closed only with the object: a late `wake` must not write into somebody else's file.
        weakref.finalize(self, os.close, self._asked).atexit = False
        self._touches = _inotify(folder, change)
        self.sees_touches = self._touches is not None
        self._poll = select.poll()
        self._poll.register(self._asked, select.POLLIN)
        if self._touches is not None:
            self._close_touches = weakref.finalize(self, os.close, self._touches)
            self._close_touches.atexit = False
            self._poll.register(self._touches, select.POLLIN)

    def wake(self) -> None:
        """End the sleep under way, or the next one."""
        with contextlib.suppress(OSError):  # a script that becomes a daemon closes all files
            os.eventfd_write(self._asked, 1)

    def sleep(self, timeout_s: float) -> bool:
        """Sleep for `timeout_s`, until `wake`, or until a touch; return True only for `wake`."""
        ready = dict(self._poll.poll(max(0.0, 1e3 * timeout_s)))
        if self._asked not in ready:
            return False
        os.eventfd_read(self._asked)
        return True

    def forget_touches(self) -> None:
        """Let what touched the folder up to now not end the next sleep."""
        if self._touches is not None:
            with contextlib.suppress(BlockingIOError):
                os.read(self._touches, 4096)

    def close(self) -> None:
        """Give the inotify instance back; called by the thread that sleeps, which is about to end.

        A script may have disabled the garbage collection that would do it.
        """
        if self._touches is not None:
            self._close_touches()
            self._touches = None


def _inotify(folder: Path, change: int) -> int | None:
    """Return a descriptor that is readable once the folder has changed so; None without one."""
    libc = ctypes.CDLL(None)
    descriptor = libc.inotify_init1(os.O_NONBLOCK | os.O_CLOEXEC)
    if descriptor < 0:
        return None
    if libc.inotify_add_watch(descriptor, os.fsencode(folder), change) < 0:
        os.close(descriptor)
        return None
    return int(descriptor)
