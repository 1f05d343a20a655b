"""The model and its inputs as a run wants them: number type, memory format and device."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from trainer.config import RunConfig
from trainer.training.activation_checkpointing import apply_activation_checkpointing
from trainer.training.precision import param_dtype


@dataclass(frozen=True, slots=True)
class InputFormat:
    """What a batch's inputs are turned into, on the device, before the model sees them."""

    dtype: torch.dtype | None = None
    """Type of floating inputs; class numbers and 8-bit images stay integers."""
    channels_last: bool = False
    """Memory format of images, which have four dimensions."""

    @classmethod
    def of(cls, config: RunConfig) -> InputFormat:
        """Return the form that the model of this run takes."""
        return cls(param_dtype(config.precision), config.channels_last)

    def __call__(self, inputs: Tensor) -> Tensor:
        """Return the inputs in this form, the same tensor where they have it."""
        if self.dtype is not None and inputs.is_floating_point():
            inputs = inputs.to(self.dtype)
        if self.channels_last and inputs.dim() == 4:
            inputs = inputs.contiguous(memory_format=torch.channels_last)
        return inputs


AS_LOADED = InputFormat()


def prepare(model: nn.Module, config: RunConfig, device: torch.device | None) -> nn.Module:
    """Change the model in place to what the configuration asks for, and move it to a device."""
    if config.activation_checkpointing:
        apply_activation_checkpointing(model, preserve_rng_state=not config.cuda_graphs)
    if config.channels_last:
        model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    dtype = param_dtype(config.precision)
    if dtype is not None:
        model.to(dtype)
        for part in model.modules():
            if isinstance(part, _BatchNorm):
                part.float()  # its sums over the batch need 32 bits; its outputs are of 16
    return model if device is None else model.to(device)
