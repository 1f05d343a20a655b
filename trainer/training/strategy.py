"""How several devices share the work of a step: DataParallel, DistributedDataParallel and FSDP2."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import nn
from torch.nn.parallel import DataParallel, DistributedDataParallel

from trainer.config import RunConfig, Strategy
from trainer.config_validation import TrainDevice
from trainer.training.fsdp import apply_fsdp, unreduced
from trainer.training.model import prepare
from trainer.training.rank_info import TrainerRank


def prepare_for_strategy(
    model: nn.Module, config: RunConfig, ranks: TrainerRank, device: torch.device
) -> nn.Module:
    """Return the model as the configuration asks for, on its device, before its optimizer is made.

    With FSDP it is spread over the ranks.
    """
    if config.strategy is not Strategy.FSDP:
        return prepare(model, config, device)
    # FSDP takes contiguous weights only; images in channels_last are enough for a convolution.
    model = prepare(model, replace(config, channels_last=False), None)
    apply_fsdp(model, config, ranks, device)
    return model


@dataclass(frozen=True, slots=True)
class ParallelModel:
    """What training runs in place of the model."""

    model: nn.Module
    """The model, wrapped where other devices help; its parameters are those of the model."""
    wrapped: nn.Module | None
    """The same, or None where nothing wraps the model."""
    apart: Callable[[], AbstractContextManager[object]]
    """Context of the batches of a step whose gradients ranks do not average yet."""

    @classmethod
    def of(
        cls, model: nn.Module, config: RunConfig, devices: Sequence[TrainDevice]
    ) -> ParallelModel:
        """Wrap a model that lies on the first of the devices, as the configuration says.

        With DDP it is a meeting of all ranks, and each takes the weights of rank 0.
        """
        if config.strategy is Strategy.DP:
            indices = [device.cuda_index or 0 for device in devices]
            copied = DataParallel(model, indices)
            return cls(copied, copied, nullcontext)
        if config.strategy is Strategy.DDP:
            ddp = _ddp(model, config, devices[0])
            return cls(ddp, ddp, _Apart(ddp, config))
        if config.strategy is Strategy.FSDP and config.no_sync:
            return cls(model, None, partial(unreduced, model))
        return cls(model, None, nullcontext)


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


def _ddp(model: nn.Module, config: RunConfig, device: TrainDevice) -> DistributedDataParallel:
    return DistributedDataParallel(
        model,
        device_ids=None if device.cuda_index is None else [device.cuda_index],
        bucket_cap_mb=config.bucket_cap_mb,
        gradient_as_bucket_view=config.gradient_as_bucket_view,
        static_graph=config.static_graph,
    )
