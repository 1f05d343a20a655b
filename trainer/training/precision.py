"""Mixed and pure 16-bit precision: autocast, the type of the weights, the gradient scaler."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

import torch

from trainer.config import Precision

_AMP_TYPES = {Precision.BF16: torch.bfloat16, Precision.FP16: torch.float16}
_PURE_TYPES = {Precision.PURE_BF16: torch.bfloat16, Precision.PURE_FP16: torch.float16}


def autocast_dtype(precision: Precision) -> torch.dtype | None:
    """Return the 16-bit type that the mixed precisions compute in; None for the others."""
    return _AMP_TYPES.get(precision)


def autocast(precision: Precision, device: torch.device) -> AbstractContextManager[object]:
    """Return the context of the forward pass; it can be entered again and again."""
    dtype = autocast_dtype(precision)
    return torch.autocast(device.type, dtype=dtype) if dtype else nullcontext()


def param_dtype(precision: Precision) -> torch.dtype | None:
    """Return the 16-bit type of weights and inputs of the pure precisions; None for the others."""
    return _PURE_TYPES.get(precision)


def grad_scaler(precision: Precision, gradients: torch.device) -> torch.amp.GradScaler:
    """Return the scaler for gradients on this device; it is enabled only for fp16.

    bf16 has the range of fp32 and needs none. Pure fp16 can have none: `unscale_` refuses
    gradients of 16 bits.
    """
    scaler = torch.amp.GradScaler(gradients.type, enabled=precision is Precision.FP16)
    if gradients.type == "cpu":
        # The scale is created on the device of the first tensor that is scaled. With weights
        # offloaded by FSDP that would be the loss on the GPU, and torch 2.13 unscales gradients on
        # the host without waiting for its copy of the scale.
        scaler.scale(torch.ones(()))
    return scaler
