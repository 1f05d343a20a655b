"""Precision (autocast, weights, gradient scaler, TF32), and flags of cuDNN and determinism."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext

import torch
from torch.backends import cudnn

from trainer.config import Precision, RunConfig
from trainer.errors import RunFailedError

_AMP_TYPES = {Precision.BF16: torch.bfloat16, Precision.FP16: torch.float16}
_PURE_TYPES = {Precision.PURE_BF16: torch.bfloat16, Precision.PURE_FP16: torch.float16}
WORKSPACES = "CUBLAS_WORKSPACE_CONFIG"
_FIXED = (":4096:8", ":16:8")  # deterministic values, from the manual of cuBLAS


def autocast_dtype(precision: Precision) -> torch.dtype | None:
    """Return the autocast dtype of mixed precision; None otherwise."""
    return _AMP_TYPES.get(precision)


def autocast(precision: Precision, device: torch.device) -> AbstractContextManager[object]:
    """Return the reusable context of the forward pass."""
    dtype = autocast_dtype(precision)
    return torch.autocast(device.type, dtype=dtype) if dtype else nullcontext()


def param_dtype(precision: Precision) -> torch.dtype | None:
    """Return the 16-bit dtype of weights and inputs in pure precision; None otherwise."""
    return _PURE_TYPES.get(precision)


def grad_scaler(precision: Precision, device: torch.device) -> torch.amp.GradScaler:
    """Return the scaler for gradients on this device, enabled for fp16 only.

    bf16 has the range of fp32, and `unscale_` does not accept pure fp16 gradients.
    """
    return torch.amp.GradScaler(device.type, enabled=precision is Precision.FP16)


@contextmanager
def run_flags(config: RunConfig) -> Iterator[None]:
    """Set the flags of precision, cuDNN and determinism, and restore them at the end.

    Uses the older TF32 settings: after the newer `fp32_precision` the older getters raise.
    """
    tf32 = config.precision is Precision.TF32
    matmul = torch.get_float32_matmul_precision()
    former = cudnn.allow_tf32, cudnn.benchmark, cudnn.deterministic
    enabled = torch.are_deterministic_algorithms_enabled()
    warn_only = torch.is_deterministic_algorithms_warn_only_enabled()
    torch.set_float32_matmul_precision("high" if tf32 else "highest")
    cudnn.allow_tf32 = tf32  # on by default
    cudnn.benchmark, cudnn.deterministic = config.cudnn_benchmark, config.deterministic
    torch.use_deterministic_algorithms(config.deterministic)
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(matmul)
        cudnn.allow_tf32, cudnn.benchmark, cudnn.deterministic = former
        torch.use_deterministic_algorithms(enabled, warn_only=warn_only)


def set_cublas_workspace_config(config: RunConfig) -> None:
    """Set the cuBLAS workspaces of a deterministic run. Raises RunFailedError if it is too late."""
    value = os.environ.get(WORKSPACES)
    if not config.deterministic or config.device == "cpu" or value in _FIXED:
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
