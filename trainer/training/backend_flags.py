"""PyTorch's process-wide flags, set for a run and restored after it."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch.backends import cudnn

from trainer.config import Precision, RunConfig
from trainer.error_messages import RunFailedError

WORKSPACES = "CUBLAS_WORKSPACE_CONFIG"
_FIXED = (":4096:8", ":16:8")
"""The two values with which cuBLAS gives the same result each time, by its manual."""


@contextmanager
def run_flags(config: RunConfig) -> Iterator[None]:
    """Set the flags of precision, of cuDNN and of determinism, and restore the former ones.

    Only the older TF32 settings are used: setting the newer `fp32_precision` makes the older
    getters raise, which breaks other code in the process.
    """
    tf32 = config.precision is Precision.TF32
    matmul = torch.get_float32_matmul_precision()
    former = cudnn.allow_tf32, cudnn.benchmark, cudnn.deterministic
    enabled = torch.are_deterministic_algorithms_enabled()
    warn_only = torch.is_deterministic_algorithms_warn_only_enabled()
    torch.set_float32_matmul_precision("high" if tf32 else "highest")
    cudnn.allow_tf32 = tf32  # on by default, so fp32 must switch it off
    cudnn.benchmark, cudnn.deterministic = config.cudnn_benchmark, config.deterministic
    torch.use_deterministic_algorithms(config.deterministic)
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(matmul)
        cudnn.allow_tf32, cudnn.benchmark, cudnn.deterministic = former
        torch.use_deterministic_algorithms(enabled, warn_only=warn_only)


def set_cublas_workspace_config(config: RunConfig) -> None:
    """Give cuBLAS the fixed workspaces that a deterministic run on a GPU needs.

    Torch reads this variable once, at the first matrix product of the process, so it stays set.
    Raises RunFailedError where a GPU has been used without it. To be called before this run uses
    one.
    """
    if not config.deterministic or config.device == "cpu":
        return
    value = os.environ.get(WORKSPACES)
    if value in _FIXED:
        return
    has_context = torch._C._cuda_hasPrimaryContext  # type: ignore[attr-defined]
    used = any(map(has_context, range(torch.cuda.device_count())))
    if used or value is not None:
        found = f"it is {value}" if value is not None else "this process began without it"
        raise RunFailedError(
            f"deterministic: cuBLAS needs {WORKSPACES}={_FIXED[0]} before a process first uses a "
            f"GPU, and {found}. Choose the process runner, or restart with the variable set."
        )
    os.environ[WORKSPACES] = _FIXED[0]
