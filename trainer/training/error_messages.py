"""Describes the exception that ended a run: cause and remedy in a sentence. Pure."""

from __future__ import annotations

import contextlib
from dataclasses import replace

import torch

from stepscope.common.config_issue import ConfigError
from stepscope.common.formatting import summary_line
from stepscope.run.status import (
    MemoryShortage,
    RunOutcome,
    describe_error,
    failed,
    out_of_memory,
    shortage,
)
from trainer.config import Precision, RunConfig, Runner, Workload
from trainer.errors import RunFailedError
from trainer.workloads.custom_file import place_in_user_code, user_workload


class NonFiniteLossError(RunFailedError):
    """The loss is NaN or infinite."""


SHARED_MEMORY_REASON = (
    "A data-loading worker ran out of shared memory. "
    "Set num_workers to 0 or give the machine a larger /dev/shm."
)
_NO_WORKSPACE = "unable to find an engine"  # cuDNN, if no convolution's workspace fits
_GPU_CALL = ("CUDA error", "cuDNN error", "CUDNN_STATUS", "CUBLAS_STATUS", "cuBLAS error")
_SHARED_MEMORY = ("/torch_", "shared memory", "bus error")
_REMEDIES = {
    MemoryShortage.GPU: "Lower the batch size or the sizes of the model, or choose bf16.",
    MemoryShortage.HOST: "Lower the batch size, the sizes of the model or num_workers.",
    MemoryShortage.PINNED: "Lower the batch size, or switch off pin_memory and non_blocking.",
}
"""The Memory tab has what fits this run."""


def describe_failure(
    error: BaseException, config: RunConfig, lost: str | None = None
) -> RunOutcome:
    """Return the outcome of a run for an exception; `lost` is the error of an unusable GPU."""
    if lost is not None:
        remedy = "Start again: each run has a process of its own"
        if config.runner is Runner.THREAD:
            remedy = "Restart the server, or run in a separate process"
        return replace(failed(f"The GPU failed: {lost}. {remedy}."), fatal=True)
    text = str(error)
    if isinstance(error, RunFailedError):
        return failed(text)
    first = summary_line(text).rstrip(".")
    short = MemoryShortage.GPU if _NO_WORKSPACE in text else shortage(error)
    if isinstance(error, RuntimeError) and "DataLoader worker" in text:
        if any(word in text for word in _SHARED_MEMORY):
            return failed(SHARED_MEMORY_REASON)
        if text.startswith("DataLoader worker"):
            return failed(
                "A DataLoader worker died. Start again; if it recurs, set num_workers to 0 and "
                "check host memory."
            )
    if short is not None:
        return out_of_memory(short, error, _REMEDIES[short])
    if isinstance(error, torch.AcceleratorError) or any(word in first for word in _GPU_CALL):
        return failed(
            f"A GPU call failed: {first[:300]}. The GPU still responds: start again, and check "
            "the traceback if it recurs."
        )
    place = None
    if config.workload is Workload.CUSTOM:
        with contextlib.suppress(ConfigError):  # the file is gone
            given = user_workload()
            place = place_in_user_code(error, given.path.parent) if given else None
    at = f" at {place}" if place else ""
    named = describe_error(error).rstrip(".")
    return failed(f"Training raised {named}{at}. See the traceback.")


def nan_remedy(config: RunConfig) -> str:
    """Return what to change for a finite loss, as a clause."""
    if config.precision in (Precision.FP16, Precision.PURE_FP16):
        return f"Choose fp32 or bf16 instead of {config.precision}, or lower the learning rate"
    return "Lower the learning rate or set a max gradient norm"
