"""FSDP2: shards weights, gradients and optimizer state over the ranks.

Each block of the model, and the model around the blocks, is a group of parameters. It is gathered
for the forward and backward pass, and its gradients are reduce-scattered.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.modules.batchnorm import _BatchNorm

from trainer.config import RunConfig, Strategy
from trainer.training.activation_checkpointing import blocks
from trainer.training.precision import autocast_dtype
from trainer.training.rank_info import TrainerRank


def apply_fsdp(
    model: nn.Module, config: RunConfig, ranks: TrainerRank, device: torch.device
) -> None:
    """Shard a model over the ranks in place, before its optimizer is created.

    All ranks have built the same model in host memory, from the same seed. Its groups move to the
    device one by one, so it never holds the full model.
    """
    mesh = init_device_mesh(device.type, (ranks.world_size,))
    casts = casts_weights(model, config)
    # Gradients are reduced in 32 bits for any dtype of the gathered weights.
    inner = MixedPrecisionPolicy(autocast_dtype(config.precision) if casts else None, torch.float32)
    outer = MixedPrecisionPolicy(inner.param_dtype, torch.float32, torch.float32 if casts else None)
    for block in blocks(model):
        fully_shard(block, mesh=mesh, mp_policy=inner)
    fully_shard(model, mesh=mesh, mp_policy=outer)


def casts_weights(model: nn.Module, config: RunConfig) -> bool:
    """Return True if FSDP casts weights to 16 bits, not autocast; batch norm needs 32 bits."""
    mixed = autocast_dtype(config.precision) is not None
    return config.strategy is Strategy.FSDP and mixed and not _norms(model)


@contextmanager
def unreduced(model: nn.Module) -> Iterator[None]:
    """Accumulate full gradients on each rank inside, without communication."""
    assert isinstance(model, FSDPModule)
    model.set_requires_gradient_sync(False)
    try:
        yield
    finally:
        model.set_requires_gradient_sync(True)


def reshard(model: nn.Module) -> None:
    """Free weights that a forward pass without a backward pass has gathered."""
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()


def all_finite(model: nn.Module, ranks: TrainerRank) -> bool:
    """Return True if all weights are finite; with sharded weights all ranks must call this."""
    parameters = list(model.parameters())
    broken = any(not bool(local_shard(weights).isfinite().all()) for weights in parameters)
    sharded = next((weights for weights in parameters if isinstance(weights, DTensor)), None)
    if sharded is None:
        return not broken
    return not ranks.sum(torch.tensor(float(broken), device=sharded.device)).item()


def local_shard(tensor: Tensor) -> Tensor:
    """Return this rank's shard of a tensor, in the same memory."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def whole(tensor: Tensor) -> Tensor:
    """Return the full tensor of all shards; all ranks must call this."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def _norms(model: nn.Module) -> bool:
    return any(isinstance(part, _BatchNorm) for part in model.modules())
