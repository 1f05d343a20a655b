"""The states and outcomes of a run: out of memory, a killed worker, a lost rank."""

from __future__ import annotations

import linecache
import re
import traceback
from dataclasses import dataclass, replace
from enum import StrEnum

from stepscope.common.formatting import terminal_text

HEARTBEAT_S = 1.0
STALE_S = 10.0
"""Silence after which a run whose process cannot be looked up counts as crashed."""
FRESH_S = 3 * HEARTBEAT_S
"""A heartbeat this young counts more than a process not found under its number.

The number may be that of another container."""


class RunStatus(StrEnum):
    """States of a run: stopped by the user, failed by an error, crashed without saying why."""

    PENDING = "pending"
    RUNNING = "running"
    PAUSED = "paused"
    FINISHED = "finished"
    STOPPED = "stopped"
    FAILED = "failed"
    CRASHED = "crashed"

    @property
    def live(self) -> bool:
        """True while the run may still write."""
        return self in (RunStatus.PENDING, RunStatus.RUNNING, RunStatus.PAUSED)


class RunKind(StrEnum):
    """Who writes a run: it decides what its page shows and which buttons it answers."""

    TRAINER = "trainer"
    """The built-in workloads."""
    WATCH = "watch"
    """A script under `stepscope watch`."""
    INIT = "init"
    """A script that calls `stepscope.init`."""
    RECORD = "record"
    """`stepscope record`: no training, the machine only."""


_OUT_OF_CUDA_MEMORY = "CUDA error: out of memory"
_OUT_OF_GPU_MEMORY = (
    "CUDA out of memory",
    "CUBLAS_STATUS_ALLOC_FAILED",
    "CUDNN_STATUS_ALLOC_FAILED",
)
_OUT_OF_HOST_MEMORY = ("DefaultCPUAllocator", "not enough memory", "Cannot allocate memory")


class Shortage(StrEnum):
    """Which memory was not enough; the value begins the sentence about it."""

    GPU = "The GPU ran out of memory"
    HOST = "The host ran out of memory"
    PINNED = "The host could not page-lock more memory"


_REMEDIES = {
    Shortage.GPU: "Use a smaller batch, a lower precision or activation checkpointing.",
    Shortage.HOST: "Smaller batches or less data kept in memory need less.",
    Shortage.PINNED: "Pin fewer or smaller batches (pin_memory, prefetch_factor).",
}


@dataclass(frozen=True, slots=True)
class Outcome:
    """How a run ended; `reason` is the sentence shown on the page.

    `failure` is the kind of the event that tells of it: "oom", "error", or None for none. After a
    `fatal` one this process can no longer use the GPU.
    """

    status: RunStatus = RunStatus.FINISHED
    reason: str | None = None
    failure: str | None = None
    fatal: bool = False


def outcome(error: BaseException | None) -> Outcome:
    """Return how a script ended that ended with this exception, or without one."""
    if error is None or (isinstance(error, SystemExit) and error.code in (None, 0)):
        return Outcome()
    if isinstance(error, KeyboardInterrupt):
        return Outcome(RunStatus.STOPPED, "Interrupted (Ctrl-C).")
    if isinstance(error, SystemExit):
        if isinstance(error.code, int):
            return Outcome(RunStatus.FAILED, f"The script ended with exit code {int(error.code)}.")
        return Outcome(RunStatus.FAILED, f"The script ended: {_said_by(error.code)[:300]}")
    short = shortage(error)
    if short is not None:
        return out_of_memory(short, error, _REMEDIES[short])
    first = _said_by(error).strip().split("\n")[0][:300]
    return failed(f"{type(error).__name__}: {first}" if first else type(error).__name__)


def failed(reason: str) -> Outcome:
    """Return the outcome of a run that an error ended."""
    return Outcome(RunStatus.FAILED, reason, failure="error")


def out_of_memory(short: Shortage, error: BaseException, remedy: str) -> Outcome:
    """Return the outcome of a run that found too little memory, with the size where it is told."""
    found = re.search(r"[Tt](ried to allocate [0-9.]+ (bytes|[KMGT]?i?B))", _said_by(error))
    asked = f" (t{found.group(1)})" if found else ""
    return Outcome(RunStatus.FAILED, f"{short}{asked}. {remedy}", failure="oom")


def with_case(ended: Outcome, case: str | None, remedy: str | None = None) -> Outcome:
    """Name the case in the reason of `out_of_memory`, and give its own remedy where it has one.

    None is a case that the first sentence names already.

    >>> short = Outcome(reason="The GPU ran out of memory (tried to allocate 2.50 GiB). Do this.")
    >>> with_case(short, "fragmentation").reason
    'The GPU ran out of memory (tried to allocate 2.50 GiB): fragmentation. Do this.'
    """
    first, _, rest = (ended.reason or "").partition(". ")
    named = f"{first}: {case}" if case else first
    return replace(ended, reason=f"{named}. {remedy or rest}")


def killed_worker(error: BaseException) -> bool:
    """Return True if a DataLoader lost a worker, as where the kernel has killed it.

    The end of its connection may be noticed before the end of its process.
    """
    text = _said_by(error)
    if isinstance(error, ConnectionError | EOFError):
        files = (frame.filename for frame in traceback.extract_tb(error.__traceback__))
        return any("torch/utils/data" in file.replace("\\", "/") for file in files)
    return "DataLoader worker" in text and ("signal: Killed" in text or "exited unexpect" in text)


def with_lost_worker(ended: Outcome, kills: int | None) -> Outcome:
    """Return the outcome of a run that lost a worker, by the kernel's count of kills since then.

    None is a count that cannot be read.
    """
    if kills is None:
        reason = (ended.reason or "").rstrip(". ")
        return replace(ended, reason=f"{reason}. Host memory may have run out: unknown here.")
    if not kills:
        return ended
    remedy = "Fewer DataLoader workers or smaller batches need less."
    reason = f"{Shortage.HOST}: the kernel killed a DataLoader worker. {remedy}"
    return Outcome(RunStatus.FAILED, reason, failure="oom")


def _said_by(value: object) -> str:
    """Return an exception's text without colors; an exception of the script's may have none."""
    try:
        return terminal_text(str(value))
    except Exception as problem:  # noqa: BLE001 - it must not take the place of the script's error
        return f"(its text cannot be told: {type(problem).__name__})"


def shortage(error: BaseException) -> Shortage | None:
    """Return the memory that was too small by this exception; None if it is about another thing."""
    text = _said_by(error)
    if _OUT_OF_CUDA_MEMORY in text:
        return Shortage.PINNED if _was_pinning(error) else Shortage.GPU
    if type(error).__name__ == "OutOfMemoryError" or any(w in text for w in _OUT_OF_GPU_MEMORY):
        return Shortage.GPU
    if isinstance(error, MemoryError) or any(word in text for word in _OUT_OF_HOST_MEMORY):
        return Shortage.HOST
    return None


def _was_pinning(error: BaseException) -> bool:
    """Say whether the call that raised this was page-locking: CUDA has one error for both."""
    if "in pin memory thread" in _said_by(error):  # the DataLoader's, with its own traceback
        return True
    frames = traceback.extract_tb(error.__traceback__)
    if not frames or frames[-1].lineno is None:
        return False
    first, last = frames[-1].lineno, frames[-1].end_lineno or frames[-1].lineno
    call = (linecache.getline(frames[-1].filename, number) for number in range(first, last + 1))
    return any("pin_memory" in line for line in call)
