"""torch's profiler, started and stopped between two steps; torch is found in `sys.modules`.

Three things about it would end a training, each tried with torch 2.13:
- a second profiler in the process takes the slot of the first, and the first one's `stop` then
  crashes: so a script that starts one of its own ends ours before;
- a process, or a thread, that ends while it profiles crashes: who starts one has to stop it;
- a forked child inherits it, and would record without an end: so a fork ends it before.
"""

from __future__ import annotations

import inspect
import logging
import os
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

from stepscope.profiling import phase_ranges

log = logging.getLogger(__name__)

OTHER_WAIT_S = 10.0
"""How long another thread's profiler waits for ours to end at a step boundary."""
_STARTERS = ("_prepare_profiler", "_enable_profiler")
"""What every profiler of torch calls first, by their names in torch.autograd.profiler."""


class ProfilerUnavailableError(Exception):
    """No profile can be taken now; the message is a sentence without a full stop."""


def why_not() -> str | None:
    """Say why no profile can be started in this thread now; None where it can."""
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
    """torch's profiler from now until `stop`, which the same thread must call."""

    def __init__(self, *, cuda: bool) -> None:
        """Raises Refused, and whatever torch raises."""
        reason = why_not()
        if reason is not None:
            raise ProfilerUnavailableError(reason)
        torch = sys.modules["torch"]
        self.cuda = cuda and not phase_ranges.under_nsight()
        """Whether kernels are recorded; Nsight Systems, where attached, has them for itself."""
        # The tracer of frames takes the place of a profiler of Python, such as cProfile.
        self.stacks = sys.getprofile() is None
        self.ended_early: str | None = None
        """Why it was stopped by something else than its owner."""
        self.asked_to_end = False
        """Another thread waits for its end."""
        self._stopped = threading.Event()
        self._thread = threading.get_ident()
        self.native_thread = threading.get_native_id()
        activity = torch.profiler.ProfilerActivity
        self._profiler: Any = torch.profiler.profile(
            activities=[activity.CPU, *([activity.CUDA] if self.cuda else [])],
            record_shapes=False,
            profile_memory=True,
            with_stack=self.stacks,
            **_one_cycle(torch),
        )
        if self.cuda:
            torch.cuda.synchronize()  # kernels of the steps before do not belong to it
        self._profiler.start()
        self._replaced = _give_way(torch.autograd.profiler, self._another)
        _watch_forks(self)
        phase_ranges.begin(nvtx=cuda)

    @property
    def here(self) -> bool:
        """Say whether this is the thread that has to stop it."""
        return threading.get_ident() == self._thread

    @property
    def running(self) -> bool:
        """Say whether it still records."""
        return not self._stopped.is_set()

    def stop(self, early: str | None = None) -> None:
        """Stop recording, and wait for the GPU; `early` says why, where the owner did not ask.

        A second call does nothing, nor one of another thread.
        """
        if not self.running or not self.here:
            return
        phase_ranges.end()
        self.ended_early = early
        _take_back(sys.modules["torch"].autograd.profiler, self._replaced)
        _watch_forks(None)
        try:
            if sys.modules["torch"].autograd._profiler_enabled():
                self._profiler.stop()
            else:  # stopping what is not there would crash
                self._profiler = None
        finally:
            self._stopped.set()

    def save(self, path: Path) -> None:
        """Write the chrome trace. Raises Refused where nothing is left of it, and OSError."""
        if self._profiler is None:
            raise ProfilerUnavailableError(
                "something else stopped the profiler, and nothing is left of it"
            )
        self._profiler.export_chrome_trace(str(path))
        self._profiler = None
        if not path.exists():
            raise OSError("torch wrote no trace, perhaps for want of disk space")

    def _another(self) -> None:
        """Another profiler is about to start."""
        if self.here:
            self.stop("the script started a profiler of its own")
        elif self.running:
            self.asked_to_end = True
            self._stopped.wait(OTHER_WAIT_S)


def _one_cycle(torch: Any) -> dict[str, bool]:
    """Keep torch from warning that it forgets the events of earlier cycles: there are none."""
    known = inspect.signature(torch.profiler.profile).parameters
    return {"acc_events": True} if "acc_events" in known else {}


def _give_way(module: Any, another: Callable[[], None]) -> dict[str, tuple[Any, Any]]:
    """Call `another` before any profiler of torch starts; return what `_take_back` needs."""
    replaced: dict[str, tuple[Any, Any]] = {}
    for name in _STARTERS:
        original = getattr(module, name)

        def start(*args: Any, _original: Any = original, **kwargs: Any) -> Any:
            another()
            return _original(*args, **kwargs)

        setattr(module, name, start)
        replaced[name] = original, start
    return replaced


def _take_back(module: Any, replaced: dict[str, tuple[Any, Any]]) -> None:
    for name, (original, ours) in replaced.items():
        if getattr(module, name) is ours:
            setattr(module, name, original)


_at_fork: ProfilerCapture | None = None


def _watch_forks(capture: ProfilerCapture | None) -> None:
    global _at_fork
    _at_fork = capture


def _before_fork() -> None:
    if _at_fork is not None:
        try:
            _at_fork.stop("the process forked, such as for workers of a DataLoader")
        except Exception:  # a fork goes on whatever happens here
            log.warning("stepscope: the profile could not be stopped", exc_info=True)


os.register_at_fork(before=_before_fork)
