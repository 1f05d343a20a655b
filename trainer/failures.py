"""Turns what ended a run into a sentence that says what happened and what to do. Pure."""

from __future__ import annotations

import re
from dataclasses import dataclass

import torch


class RunFailed(Exception):
    """A failure that the loop foresaw; the message is its sentence, a traceback tells no more."""


class NanLoss(RunFailed):
    """The loss is no number any more."""


@dataclass(frozen=True, slots=True)
class Failure:
    """`kind` is the event's kind; a `fatal` one leaves this process unable to use the GPU."""

    kind: str
    reason: str
    fatal: bool = False


_OUT_OF_GPU_MEMORY = (
    "CUDA error: out of memory",  # outside torch's allocator; the process can go on
    "CUBLAS_STATUS_ALLOC_FAILED",
    "CUDNN_STATUS_ALLOC_FAILED",
    "unable to find an engine",  # cuDNN, when no convolution's workspace fits
)
OOM_REMEDY = "Lower batch_size, image_size or width, or choose bf16"
SHARED_MEMORY_REASON = (
    "A data-loading worker ran out of shared memory. "
    "Set num_workers to 0 or give the machine a larger /dev/shm."
)
_OUT_OF_HOST_MEMORY = ("DefaultCPUAllocator", "not enough memory", "Cannot allocate memory")
_SHARED_MEMORY = ("/torch_", "shared memory", "bus error")


def explain(error: BaseException) -> Failure:
    """Return what to tell the user about an exception of the training thread."""
    text = str(error)
    first = text.strip().split("\n")[0].rstrip(".")
    short_of_memory = any(word in text for word in _OUT_OF_GPU_MEMORY)
    if isinstance(error, torch.OutOfMemoryError) or short_of_memory:
        asked = re.search(r"Tried to allocate [0-9.]+ [KMGT]?i?B", text)
        detail = f" ({asked.group()})" if asked else ""
        return Failure("oom", f"The GPU ran out of memory{detail}. {OOM_REMEDY}.")
    if isinstance(error, torch.AcceleratorError) or text.startswith("CUDA error"):
        return Failure(
            "error",
            f"The GPU failed: {first}. This process cannot use it any more: "
            "restart the server, or use the process runner.",
            fatal=True,
        )
    if isinstance(error, RuntimeError) and "DataLoader worker" in text:
        if any(word in text for word in _SHARED_MEMORY):
            return Failure("error", SHARED_MEMORY_REASON)
        if text.startswith("DataLoader worker"):
            return Failure("error", _worker_reason(text))
    if isinstance(error, MemoryError) or any(word in text for word in _OUT_OF_HOST_MEMORY):
        return Failure("oom", f"The host ran out of memory. {OOM_REMEDY}.")
    if isinstance(error, RunFailed):
        return Failure("error", text)
    return Failure(
        "error", f"Training raised {type(error).__name__}: {first[:300]}. See the traceback."
    )


def _worker_reason(text: str) -> str:
    pids = ", ".join(re.findall(r"\d+", text.split("exited")[0].split("killed")[0]))
    which = f" (process {pids})" if pids else ""
    return (
        f"A data-loading worker died{which}. Start again; if it dies again, "
        "set num_workers to 0 and look at the host's memory."
    )
