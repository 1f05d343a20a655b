"""The model of a run: number type, memory format, device, and DataParallel, DDP or FSDP2."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.parallel import DataParallel, DistributedDataParallel

from trainer.config import RunConfig, Strategy
from trainer.config_validation import TrainDevice
from trainer.training.activation_checkpointing import apply_activation_checkpointing
from trainer.training.fsdp import apply_fsdp, unreduced
from trainer.training.precision import param_dtype
from trainer.training.rank_info import TrainerRank


@dataclass(frozen=True, slots=True)
class InputFormat:
    """What a batch's inputs are turned into, on the device, before the model sees them."""

    dtype: torch.dtype | None = None
    """Type of floating inputs; class numbers and 8-bit images stay integers."""
    channels_last: bool = False  # Memory format of images, which have four dimensions.

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


def prepare(
    model: nn.Module, config: RunConfig, device: torch.device, ranks: TrainerRank | None = None
) -> nn.Module:
    """Change the model in place to what the configuration asks for, and move it to a device.

    To be called before the optimizer is made. With FSDP it is spread over `ranks`.
    """
    fsdp = config.strategy is Strategy.FSDP and ranks is not None
    if config.activation_checkpointing:
        apply_activation_checkpointing(model, preserve_rng_state=not config.cuda_graphs)
    # FSDP takes contiguous weights only; images in channels_last are enough for a convolution.
    if config.channels_last and not fsdp:
        model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    dtype = param_dtype(config.precision)
    if dtype is not None:
        model.to(dtype)
        for part in model.modules():
            if isinstance(part, _BatchNorm):
                part.float()  # its sums over the batch need 32 bits; its outputs are of 16
    if not fsdp or ranks is None:
        return model.to(device)
    apply_fsdp(model, config, ranks, device)
    return model


@dataclass(frozen=True, slots=True)
class ParallelModel:
    """The model that training runs: `model` is wrapped where other devices help."""

    model: nn.Module
    apart: Callable[[], AbstractContextManager[object]] = nullcontext
    """Context of the batches of a step whose gradients ranks do not average yet."""

    @classmethod
    def of(
        cls, model: nn.Module, config: RunConfig, devices: Sequence[TrainDevice]
    ) -> ParallelModel:
        """Wrap a model that lies on the first of the devices.

        With DDP all ranks have to call it, and each takes the weights of rank 0.
        """
        if config.strategy is Strategy.DP:
            return cls(DataParallel(model, [device.cuda_index or 0 for device in devices]))
        if config.strategy is Strategy.DDP:
            index = devices[0].cuda_index
            ddp = DistributedDataParallel(
                model,
                device_ids=None if index is None else [index],
                bucket_cap_mb=config.bucket_cap_mb,
                gradient_as_bucket_view=config.gradient_as_bucket_view,
                static_graph=config.static_graph,
            )
            return cls(ddp, _Apart(ddp, config))
        if config.strategy is Strategy.FSDP and config.no_sync:
            return cls(model, partial(unreduced, model))
        return cls(model)


class _Apart:
    """Gives the context in which gradients are added up, and not averaged over the ranks yet."""

    def __init__(self, ddp: DistributedDataParallel, config: RunConfig) -> None:
        self._no_sync = ddp.no_sync if config.no_sync else nullcontext
        # A static graph is learned in the first backward pass. If that is without averaging, torch
        # 2.13 ends with "expect_autograd_hooks_ INTERNAL ASSERT FAILED".
        self._learned = not config.static_graph

    def __call__(self) -> AbstractContextManager[object]:
        learned, self._learned = self._learned, True
        context: AbstractContextManager[object] = self._no_sync() if learned else nullcontext()
        return context
