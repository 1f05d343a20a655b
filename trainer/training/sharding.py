"""FSDP2: weights, gradients and optimizer state are spread over the ranks.

Each block of the model, and the model around them, is a group of weights: all ranks together hold
one copy of it. It is gathered for the block's forward and backward pass, and its gradients are
added up over the ranks and spread again.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    FSDPModule,
    MixedPrecisionPolicy,
    OffloadPolicy,
    fully_shard,
)
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.nn.modules.batchnorm import _BatchNorm

from trainer.config import Parallel, RunConfig
from trainer.failures import RunFailed
from trainer.training.precision import amp_type, weight_type
from trainer.training.ranks import Ranks
from trainer.training.recompute import blocks


def shard(model: nn.Module, config: RunConfig, ranks: Ranks, device: torch.device) -> None:
    """Spread a model over the ranks, in place; before its optimizer is made.

    The model may lie on the host: each group goes to the device by itself, so that it never holds
    the whole model. Raises RunFailed for number types that cannot be mixed.
    """
    if weight_type(config.precision) is not None and _norms(model):
        raise RunFailed(
            f"precision: in {config.precision} batch norm keeps 32 bits, and fsdp wants one type "
            f"for all weights of a block. Choose {config.precision.removeprefix('pure_')} or ddp."
        )
    mesh = init_device_mesh(device.type, (ranks.world_size,))
    offload = CPUOffloadPolicy() if config.cpu_offload else OffloadPolicy()
    casts = casts_weights(model, config)
    # Gradients are added up in 32 bits, whatever the weights are gathered in.
    inner = MixedPrecisionPolicy(amp_type(config.precision) if casts else None, torch.float32)
    outer = MixedPrecisionPolicy(inner.param_dtype, torch.float32, torch.float32 if casts else None)
    for block in blocks(model):
        fully_shard(
            block,
            mesh=mesh,
            reshard_after_forward=config.reshard,
            mp_policy=inner,
            offload_policy=offload,
        )
    fully_shard(
        model,
        mesh=mesh,
        reshard_after_forward=config.reshard,
        mp_policy=outer,
        offload_policy=offload,
    )


def casts_weights(model: nn.Module, config: RunConfig) -> bool:
    """Say whether FSDP itself makes the weights 16 bits for the computing, instead of autocast.

    It gathers half the bytes then. Batch norm computes with weights of 32 bits only, so a model
    that has it stays with autocast.
    """
    mixed = amp_type(config.precision) is not None
    return config.parallel is Parallel.FSDP and mixed and not _norms(model)


def reshard(model: nn.Module) -> None:
    """Free the weights that a forward pass without a backward pass has gathered."""
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()


def all_finite(model: nn.Module, ranks: Ranks) -> bool:
    """Say whether all weights are finite; where they are spread, all ranks have to ask together."""
    parameters = list(model.parameters())
    broken = [not bool(local(part).isfinite().all()) for part in parameters]
    if any(isinstance(part, DTensor) for part in parameters):
        counted = torch.tensor(float(any(broken)), device=_mesh_device(parameters))
        return not ranks.sum(counted).item()
    return not any(broken)


def local(tensor: Tensor) -> Tensor:
    """Return what this rank has of a tensor, in the same memory."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def whole(tensor: Tensor) -> Tensor:
    """Return a tensor with the parts of all ranks, which have to call this together."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def spread_like(value: Tensor, like: Tensor) -> Tensor:
    """Return this rank's part of a whole tensor where `like`, of its shape, is spread."""
    if not isinstance(like, DTensor) or isinstance(value, DTensor) or value.shape != like.shape:
        return value
    value = value.to(like.to_local().device)
    # Every rank has read the same file: nothing needs to be sent.
    return distribute_tensor(value, like.device_mesh, like.placements, src_data_rank=None)


def _mesh_device(parameters: Iterable[Tensor]) -> torch.device:
    """Return the type of device that the ranks talk by, which offloaded weights do not lie on."""
    return next(
        torch.device(part.device_mesh.device_type)
        for part in parameters
        if isinstance(part, DTensor)
    )


def _norms(model: nn.Module) -> bool:
    parts: Iterable[nn.Module] = model.modules()
    return any(isinstance(part, _BatchNorm) for part in parts)
