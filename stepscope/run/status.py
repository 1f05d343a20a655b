"""The states of a run, and its outcome: the line of an error that matters, and what to do."""

from __future__ import annotations

import re
import traceback
from dataclasses import dataclass, replace
from enum import StrEnum
from pathlib import Path

from stepscope.common.formatting import summary_line, terminal_text
from stepscope.common.json_values import to_text
from stepscope.common.stack_phases import is_own_file

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
    return bool(frames) and "pin_memory" in (frames[-1].line or "")


MAX_CHARS = 300
_CAUGHT = re.compile(r"Caught \w+ (in .+)\.\n")  # torch's, before the traceback of a worker
_FRAME = re.compile(r'^ +File "(.+)", line (\d+), in (.+)$', re.MULTILINE)
_NCCLS_CAUSE = "Last error:\n"
_KNOWN_ERRORS = {
    re.compile("device-side assert triggered"): (
        "An index or a class label is out of range: CUDA_LAUNCH_BLOCKING=1, or one batch on the "
        "CPU, shows where."
    ),
    re.compile("Cannot re-initialize CUDA in forked subprocess"): (
        "Make no CUDA calls in the Dataset, or start its workers by spawn: "
        'DataLoader(multiprocessing_context="spawn").'
    ),
    re.compile("signal: Bus error|file </torch_.*No space left|out of shared memory"): (
        "/dev/shm is full: use a larger one (docker run --shm-size=8g), fewer workers or smaller "
        "batches."
    ),
    re.compile("Expected to have finished reduction in the prior iteration"): (
        "Some parameters got no gradient: use DistributedDataParallel(find_unused_parameters=True) "
        "or remove them (TORCH_DISTRIBUTED_DEBUG=DETAIL names them)."
    ),
    re.compile("Duplicate GPU detected"): (
        'Give each rank its own GPU: torch.cuda.set_device(int(os.environ["LOCAL_RANK"])).'
    ),
}


def text_of(value: object) -> str:
    """Return an exception's text without colors."""
    return terminal_text(to_text(value))


def known_error(error: BaseException) -> BaseException:
    """Return the error, or the one of its causes that has a remedy."""
    cause: BaseException | None = error
    while cause is not None:
        if remedy_for(text_of(cause)) is not None:
            return cause
        cause = cause.__cause__
    return error


def remedy_for(text: str) -> str | None:
    """Return what to do about a known error; None for any other."""
    return next((remedy for error, remedy in _KNOWN_ERRORS.items() if error.search(text)), None)


def split_remedy(reason: str) -> tuple[str, str | None]:
    """Return a reason without its remedy, and the remedy of `describe_error` if any."""
    for remedy in _KNOWN_ERRORS.values():
        if reason.endswith(remedy):
            return reason.removesuffix(remedy).rstrip(), remedy
    return reason, None


def describe_error(error: BaseException) -> str:
    """Return the line of an error that matters, with its type, and the remedy of a known error."""
    error = known_error(error)
    text = text_of(error)
    caught = _CAUGHT.match(text)
    if caught:
        line = _line_of_worker(text, caught[1])
    else:
        found = summary_line(text.partition(_NCCLS_CAUSE)[2]) or summary_line(text)
        line = ": ".join(filter(None, (type(error).__name__, found[:MAX_CHARS])))
    remedy = remedy_for(text)
    return line if remedy is None else f"{line.rstrip('. ')}. {remedy}"


def _line_of_worker(text: str, where: str) -> str:
    """Return the error in a worker's traceback, with the innermost frame of the user's files."""
    frames = list(_FRAME.finditer(text))
    after = text[frames[-1].end() :].splitlines() if frames else []
    lines = [line for line in after if line and not line[0].isspace()]
    named = (summary_line("\n".join(lines)) or summary_line(text))[:MAX_CHARS]
    own = next((frame for frame in reversed(frames) if is_own_file(frame[1])), None)
    place = "" if own is None else f", {Path(own[1]).name}:{own[2]} in {own[3]}"
    return f"{named}{place} ({where.removeprefix('in ')})"
