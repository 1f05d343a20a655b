"""The states and outcomes of a run."""

from __future__ import annotations

import linecache
import re
import traceback
from dataclasses import dataclass, replace
from enum import StrEnum

from stepscope.run.error_text import describe_error, known_error, remedy_for, text_of

HEARTBEAT_S = 1.0
STALE_S = 10.0
"""Age of a heartbeat from which a run whose process cannot be seen counts as crashed."""


class RunStatus(StrEnum):
    """Status of a run: stopped by the user, failed by an error, crashed without a reason."""

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
        return self in _LIVE


_LIVE = (RunStatus.PENDING, RunStatus.RUNNING, RunStatus.PAUSED)


class RunKind(StrEnum):
    """Program that writes a run; determines content and buttons of its page."""

    TRAINER = "trainer"  # the built-in workloads
    WATCH = "watch"  # a script under `stepscope watch`
    INIT = "init"  # a script that calls `stepscope.init`


_OUT_OF_CUDA_MEMORY = "CUDA error: out of memory"
_OUT_OF_GPU_MEMORY = (
    "CUDA out of memory",
    "CUBLAS_STATUS_ALLOC_FAILED",
    "CUDNN_STATUS_ALLOC_FAILED",
)
_OUT_OF_HOST_MEMORY = ("DefaultCPUAllocator", "not enough memory", "Cannot allocate memory")


class MemoryShortage(StrEnum):
    """Memory that was exhausted; the value begins its sentence."""

    GPU = "The GPU ran out of memory"
    HOST = "The host ran out of memory"
    PINNED = "The host could not page-lock more memory"


_REMEDIES = {
    MemoryShortage.GPU: "Use a smaller batch, a lower precision or activation checkpointing.",
    MemoryShortage.HOST: "Smaller batches or less data kept in memory need less.",
    MemoryShortage.PINNED: "Pin fewer or smaller batches (pin_memory, prefetch_factor).",
}


@dataclass(frozen=True, slots=True)
class RunOutcome:
    """Outcome of a run; `reason` is the sentence shown on the page.

    `failure` is the kind of its event: "oom", "error", or None. After a `fatal` failure this
    process can no longer use the GPU.
    """

    status: RunStatus = RunStatus.FINISHED
    reason: str | None = None
    failure: str | None = None
    fatal: bool = False


def outcome(error: BaseException | None) -> RunOutcome:
    """Return the outcome of a script by its exception; None for a normal exit."""
    if error is None or (isinstance(error, SystemExit) and error.code in (None, 0)):
        return RunOutcome()
    if isinstance(error, KeyboardInterrupt):
        return RunOutcome(RunStatus.STOPPED, "Interrupted (Ctrl-C).")
    if isinstance(error, SystemExit):
        code, text = error.code, f": {text_of(error.code)[:300]}"
        end = f" with exit code {int(code)}." if isinstance(code, int) else text
        return RunOutcome(RunStatus.FAILED, f"The script ended{end}")
    memory = shortage(error)
    if memory is not None:
        return out_of_memory(memory, error, _REMEDIES[memory])
    return failed(describe_error(error))


def failed(reason: str) -> RunOutcome:
    """Return the outcome of a run that an error ended."""
    return RunOutcome(RunStatus.FAILED, reason, failure="error")


def out_of_memory(short: MemoryShortage, error: BaseException, remedy: str) -> RunOutcome:
    """Return the outcome of an out-of-memory error, with the requested size if known."""
    match = re.search(r"[Tt](ried to allocate [0-9.]+ (bytes|[KMGT]?i?B))", text_of(error))
    size = f" (t{match[1]})" if match else ""
    return RunOutcome(RunStatus.FAILED, f"{short}{size}. {remedy}", failure="oom")


def with_cause(ended: RunOutcome, cause: str | None, remedy: str | None = None) -> RunOutcome:
    """Add an OOM cause to the reason of `out_of_memory`, and its remedy if any."""
    first, _, rest = (ended.reason or "").partition(". ")
    named = f"{first}: {cause}" if cause else first
    return replace(ended, reason=f"{named}. {remedy or rest}")


def killed_worker(error: BaseException) -> bool:
    """Return True if a DataLoader lost a worker, such as by the kernel's OOM killer."""
    text = text_of(error)
    if isinstance(error, ConnectionError | EOFError):  # closed before the process has ended
        files = (frame.filename for frame in traceback.extract_tb(error.__traceback__))
        return any("torch/utils/data" in file.replace("\\", "/") for file in files)
    if remedy_for(text_of(known_error(error))) is not None:
        return False
    return "DataLoader worker" in text and ("signal: Killed" in text or "exited unexpect" in text)


def with_lost_worker(ended: RunOutcome, kills: int | None) -> RunOutcome:
    """Return the outcome after a lost worker; `kills` counts OOM kills, None if unknown."""
    if kills is None:
        reason = (ended.reason or "").rstrip(". ")
        return replace(ended, reason=f"{reason}. Host memory may have run out: unknown here.")
    if not kills:
        return ended
    remedy = "Fewer DataLoader workers or smaller batches need less."
    reason = f"{MemoryShortage.HOST}: the kernel killed a DataLoader worker. {remedy}"
    return RunOutcome(RunStatus.FAILED, reason, failure="oom")


def shortage(error: BaseException) -> MemoryShortage | None:
    """Return the memory that this exception reports as exhausted, or None."""
    text = text_of(error)
    if _OUT_OF_CUDA_MEMORY in text:
        return MemoryShortage.PINNED if _was_pinning(error) else MemoryShortage.GPU
    if type(error).__name__ == "OutOfMemoryError" or any(w in text for w in _OUT_OF_GPU_MEMORY):
        return MemoryShortage.GPU
    if isinstance(error, MemoryError) or any(word in text for word in _OUT_OF_HOST_MEMORY):
        return MemoryShortage.HOST
    return None


def _was_pinning(error: BaseException) -> bool:
    """Return True if the failed call pins memory: CUDA has one error for both."""
    if "in pin memory thread" in text_of(error):  # the DataLoader's, with its own traceback
        return True
    frames = traceback.extract_tb(error.__traceback__)
    if not frames or frames[-1].lineno is None:
        return False
    first, last = frames[-1].lineno, frames[-1].end_lineno or frames[-1].lineno
    call = (linecache.getline(frames[-1].filename, number) for number in range(first, last + 1))
    return any("pin_memory" in line for line in call)
