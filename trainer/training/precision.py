"""Mixed and pure 16-bit precision: autocast, dtype of the weights, gradient scaler."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

import torch

from trainer.config import Precision

_AMP_TYPES = {Precision.BF16: torch.bfloat16, Precision.FP16: torch.float16}
_PURE_TYPES = {Precision.PURE_BF16: torch.bfloat16, Precision.PURE_FP16: torch.float16}


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


def grad_scaler(precision: Precision, gradients: torch.device) -> torch.amp.GradScaler:
    """Return the scaler for gradients on this device, enabled for fp16 only.

    bf16 has the range of fp32, and `unscale_` does not accept pure fp16 gradients.
    """
    scaler = torch.amp.GradScaler(gradients.type, enabled=precision is Precision.FP16)
    if gradients.type == "cpu":
        # Creates the scale on the CPU. With FSDP's CPU offload it would follow the loss to the GPU,
        # and torch 2.13 unscales host gradients without waiting for its copy of the scale.
        scaler.scale(torch.ones(()))
    return scaler
