"""How a script ended, in a status and a sentence. Pure."""

from __future__ import annotations

import re
from dataclasses import dataclass

from stepscope.output import terminal_text
from stepscope.run import RunStatus

_OUT_OF_GPU_MEMORY = ("CUDA error: out of memory", "CUDA out of memory",
                      "CUBLAS_STATUS_ALLOC_FAILED", "CUDNN_STATUS_ALLOC_FAILED")  # fmt: skip
_OUT_OF_HOST_MEMORY = ("DefaultCPUAllocator", "not enough memory", "Cannot allocate memory")
_OOM_REMEDY = "A smaller batch, a lower precision or gradient checkpointing needs less."


@dataclass(frozen=True, slots=True)
class Outcome:
    """`failure` is the kind of the event that tells of it: "oom", "error", or None for none."""

    status: RunStatus = RunStatus.FINISHED
    reason: str | None = None
    failure: str | None = None


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
    text = _said_by(error)
    asked = re.search(r"[Tt]ried to allocate [0-9.]+ (bytes|[KMGT]?i?B)", text)
    detail = f" ({asked.group().lower()[0]}{asked.group()[1:]})" if asked else ""
    if type(error).__name__ == "OutOfMemoryError" or any(w in text for w in _OUT_OF_GPU_MEMORY):
        return Outcome(
            RunStatus.FAILED, f"The GPU ran out of memory{detail}. {_OOM_REMEDY}", failure="oom"
        )
    if isinstance(error, MemoryError) or any(word in text for word in _OUT_OF_HOST_MEMORY):
        return Outcome(
            RunStatus.FAILED, f"The host ran out of memory{detail}. {_OOM_REMEDY}", failure="oom"
        )
    first = text.strip().split("\n")[0][:300]
    reason = f"{type(error).__name__}: {first}" if first else type(error).__name__
    return Outcome(RunStatus.FAILED, reason, failure="error")


def _said_by(value: object) -> str:
    """Return an exception's text without colors; one of the script's may fail at telling it."""
    try:
        return terminal_text(str(value))
    except Exception as problem:  # noqa: BLE001 - it must not take the place of the script's error
        return f"(its text cannot be told: {type(problem).__name__})"
