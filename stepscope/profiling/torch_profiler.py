"""Start and stop torch's profiler between two steps, without importing torch.

Three cases would crash the training (torch 2.13), so each ends a profile first:
- a second profiler in the process: the `stop` of the first one crashes;
- the end of a process or thread that profiles: the thread that starts a profile must stop it;
- a fork: the child inherits the profiler and would record forever.
"""

from __future__ import annotations

import gzip
import logging
import os
import secrets
import shutil
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

from stepscope.common.files import atomic_replace
from stepscope.profiling import phase_ranges

log = logging.getLogger(__name__)

OTHER_WAIT_S = 10.0  # Longest wait of another thread's profiler for the end of this one.
GZIP_LEVEL = 4  # 1/14 of the size; 9 takes five times as long for 10% less.
_STARTERS = ("_prepare_profiler", "_enable_profiler")  # Of torch.autograd.profiler; called first.


class ProfilerUnavailableError(Exception):
    """Profiling is impossible now; the message is a sentence without a full stop."""


def why_not() -> str | None:
    """Return why profiling in this thread is impossible now, or None."""
    torch = sys.modules.get("torch")
    if torch is None:
        return "torch is not imported"
    profiler = torch.autograd.profiler
    if torch.autograd._profiler_enabled() or profiler._is_profiler_enabled:
        return (
            "another torch profiler is active, such as one of the script's own; two at once "
            "would corrupt each other"
        )
    return None


class ProfilerCapture:
    """torch's profiler from now until `stop`, which the same thread must call.

    Raises ProfilerUnavailableError, and whatever torch raises.
    """

    def __init__(self, *, cuda: bool) -> None:
        if (reason := why_not()) is not None:
            raise ProfilerUnavailableError(reason)
        torch = sys.modules["torch"]
        self.cuda = cuda and not phase_ranges.under_nsight()  # Nsight prevents recording kernels.
        self.ended_early: str | None = None  # Why anything but its owner stopped it.
        self.must_end = False
        """True if it has ended, or another thread waits for its end."""
        self._stopped = threading.Event()
        self._thread = threading.get_ident()
        activity = torch.profiler.ProfilerActivity
        self._profiler: Any = torch.profiler.profile(
            activities=[activity.CPU, *([activity.CUDA] if self.cuda else [])],
            record_shapes=False,
            profile_memory=True,
            # Without it torch warns of dropped events of earlier cycles, of which there are none.
            acc_events=True,
        )
        if self.cuda:
            torch.cuda.synchronize()  # kernels of the steps before do not belong to it
        self._profiler.start()
        self._replaced = _give_way(torch.autograd.profiler, self._another)
        _running.append(self)
        phase_ranges.begin(nvtx=cuda)

    @property
    def running(self) -> bool:
        """True while it records."""
        return not self._stopped.is_set()

    def stop(self, early: str | None = None) -> None:
        """Stop recording, and wait for the GPU; `early` is why, unless the owner stops it.

        Does nothing in another thread, or when called again.
        """
        if not self.running or threading.get_ident() != self._thread:
            return
        phase_ranges.end()
        self.ended_early = early
        autograd = sys.modules["torch"].autograd
        for name, (original, wrapper) in self._replaced.items():
            if getattr(autograd.profiler, name) is wrapper:
                setattr(autograd.profiler, name, original)
        _running.remove(self)
        try:
            if autograd._profiler_enabled():
                self._profiler.stop()
            else:  # stopping a profiler that has ended would crash
                self._profiler = None
        finally:
            self.must_end = True
            self._stopped.set()

    def write(self, path: Path) -> list[Any]:
        """Write the gzipped trace; return the rows of `key_averages()`.

        Raises ProfilerUnavailableError if nothing was recorded, and OSError.
        """
        profiler, self._profiler = self._profiler, None
        if profiler is None:
            raise ProfilerUnavailableError(
                "something else stopped the profiler, and nothing is left of it"
            )
        raw = path.with_name(f".{path.name}.{secrets.token_hex(8)}.part")
        try:
            profiler.export_chrome_trace(str(raw))
            if not raw.exists():
                raise OSError("torch wrote no trace, perhaps for want of disk space")
            with (
                atomic_replace(path, durable=False) as part,
                raw.open("rb") as source,
                gzip.GzipFile("", "wb", GZIP_LEVEL, part) as packed,
            ):
                shutil.copyfileobj(source, packed, 2**20)
        finally:
            raw.unlink(missing_ok=True)
        return list(profiler.key_averages())

    def _another(self) -> None:
        """End, or make the training thread end, before another profiler starts."""
        if threading.get_ident() == self._thread:
            self.stop("the script started a profiler of its own")
        elif not self._stopped.is_set():
            self.must_end = True
            self._stopped.wait(OTHER_WAIT_S)


def _give_way(module: Any, another: Callable[[], None]) -> dict[str, tuple[Any, Any]]:
    """Call `another` before any profiler starts; return each original and its wrapper."""
    replaced: dict[str, tuple[Any, Any]] = {}
    for name in _STARTERS:
        original = getattr(module, name)

        def start(*args: Any, _original: Any = original, **kwargs: Any) -> Any:
            another()
            return _original(*args, **kwargs)

        setattr(module, name, start)
        replaced[name] = original, start
    return replaced


_running: list[ProfilerCapture] = []


def _before_fork() -> None:
    for capture in tuple(_running):
        try:
            capture.stop("the process forked, such as for workers of a DataLoader")
        except Exception:  # the fork must not fail for this
            log.warning("stepscope: the profile could not be stopped", exc_info=True)


os.register_at_fork(before=_before_fork)
