"""FSDP2: weights, gradients and optimizer state are spread over the ranks.

Each block of the model, and the model around them, is a group of weights: all ranks together hold
one copy of it. It is gathered for the block's forward and backward pass, and its gradients are
added up over the ranks and spread again.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

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
from torch.nn.modules.module import register_module_parameter_registration_hook

from trainer.config import RunConfig, Strategy, Workload
from trainer.error_messages import RunFailedError
from trainer.training.activation_checkpointing import blocks
from trainer.training.precision import autocast_dtype, param_dtype
from trainer.training.rank_info import TrainerRank


@contextmanager
def weights_on_first_rank(config: RunConfig, ranks: TrainerRank) -> Iterator[None]:
    """Build a model inside whose weights only rank 0 holds, where FSDP can send them to the others.

    On the other ranks parameters have a shape and no memory (meta device), ties included, until
    `apply_fsdp`. Buffers hold their values on all ranks. A model of the user's may need the values
    of its weights, and is built whole on each rank.
    """
    if not _sent_by_first(config) or not ranks.rank:
        yield
        return

    def without_memory(_module: nn.Module, _name: str, weights: nn.Parameter) -> nn.Parameter:
        return weights if weights.is_meta else _empty(weights, torch.device("meta"))

    # torch's annotation says that a hook returns nothing, its documentation a new parameter.
    hook = register_module_parameter_registration_hook(without_memory)  # type: ignore[arg-type]
    try:
        yield
    finally:
        hook.remove()


def apply_fsdp(
    model: nn.Module, config: RunConfig, ranks: TrainerRank, device: torch.device
) -> None:
    """Spread a model over the ranks, in place; before its optimizer is made.

    The model may lie on the host: each group goes to the device by itself, so that it never holds
    the whole model. Weights without memory come from rank 0, one at a time. Raises RunFailedError
    for number types that cannot be mixed.
    """
    if param_dtype(config.precision) is not None and _norms(model):
        raise RunFailedError(
            f"precision: with {config.precision}, batch norm stays in 32 bits, but FSDP needs "
            f"one dtype per block. Choose {config.precision.removeprefix('pure_')} or ddp."
        )
    mesh = init_device_mesh(device.type, (ranks.world_size,))
    offload = CPUOffloadPolicy() if config.cpu_offload else OffloadPolicy()
    casts = casts_weights(model, config)
    # Gradients are added up in 32 bits, whatever the weights are gathered in.
    inner = MixedPrecisionPolicy(autocast_dtype(config.precision) if casts else None, torch.float32)
    outer = MixedPrecisionPolicy(inner.param_dtype, torch.float32, torch.float32 if casts else None)
    whole = {name: weights.detach() for name, weights in model.named_parameters()}
    for block in blocks(model):
        _give_memory(block, device)
        fully_shard(
            block,
            mesh=mesh,
            reshard_after_forward=config.reshard_after_forward,
            mp_policy=inner,
            offload_policy=offload,
        )
    _give_memory(model, device)
    fully_shard(
        model,
        mesh=mesh,
        # None: the root's weights, which backward needs first, are kept after the forward pass.
        reshard_after_forward=None if config.reshard_after_forward else False,
        mp_policy=outer,
        offload_policy=offload,
    )
    if _sent_by_first(config):
        _send_from_first(model, whole)


@torch.no_grad()
def _send_from_first(model: nn.Module, whole: Mapping[str, Tensor]) -> None:
    """Give each rank its part of the weights that rank 0 has in `whole`, by their names."""
    for name, weights in model.named_parameters():
        assert isinstance(weights, DTensor)
        mesh = weights.device_mesh
        value = whole[name]
        if value.is_meta:
            value = torch.empty_like(value, device=mesh.device_type)
        sent = distribute_tensor(value.to(mesh.device_type), mesh, weights.placements)
        weights.to_local().copy_(sent.to_local())


def _sent_by_first(config: RunConfig) -> bool:
    return config.strategy is Strategy.FSDP and config.workload is not Workload.CUSTOM


def _give_memory(module: nn.Module, device: torch.device) -> None:
    """Replace parameters on the meta device by uninitialized ones, tied ones by the same."""
    made: dict[nn.Parameter, nn.Parameter] = {}
    for part in module.modules():
        for name, weights in list(part.named_parameters(recurse=False)):
            if weights.is_meta:
                made.setdefault(weights, _empty(weights, device))
                part.register_parameter(name, made[weights])


def _empty(weights: nn.Parameter, device: torch.device) -> nn.Parameter:
    return nn.Parameter(torch.empty_like(weights, device=device), weights.requires_grad)


def casts_weights(model: nn.Module, config: RunConfig) -> bool:
    """Say whether FSDP itself makes the weights 16 bits for the computing, instead of autocast.

    It gathers half the bytes then. Batch norm computes with weights of 32 bits only, so a model
    that has it stays with autocast.
    """
    mixed = autocast_dtype(config.precision) is not None
    return config.strategy is Strategy.FSDP and mixed and not _norms(model)


@contextmanager
def unreduced(model: nn.Module) -> Iterator[None]:
    """Add up whole gradients on each rank within: no rank sends or drops any until after it."""
    assert isinstance(model, FSDPModule)
    model.set_requires_gradient_sync(False)
    try:
        yield
    finally:
        model.set_requires_gradient_sync(True)


def reshard(model: nn.Module) -> None:
    """Free the weights that a forward pass without a backward pass has gathered."""
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()


def all_finite(model: nn.Module, ranks: TrainerRank) -> bool:
    """Say whether all weights are finite; where they are spread, all ranks have to ask together."""
    parameters = list(model.parameters())
    broken = any(not bool(local_shard(part).isfinite().all()) for part in parameters)
    spread = next((part for part in parameters if isinstance(part, DTensor)), None)
    if spread is None:
        return not broken
    # The device that the ranks talk by; offloaded weights do not lie on it.
    device = spread.device_mesh.device_type
    return not ranks.sum(torch.tensor(float(broken), device=device)).item()


def local_shard(tensor: Tensor) -> Tensor:
    """Return what this rank has of a tensor, in the same memory."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def whole(tensor: Tensor) -> Tensor:
    """Return a tensor with the parts of all ranks, which have to call this together."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def distribute_like(value: Tensor, like: Tensor) -> Tensor:
    """Return this rank's part of a whole tensor where `like`, of its shape, is spread."""
    if not isinstance(like, DTensor) or isinstance(value, DTensor) or value.shape != like.shape:
        return value
    value = value.to(like.to_local().device)
    # Every rank has read the same file: nothing needs to be sent.
    return distribute_tensor(value, like.device_mesh, like.placements, src_data_rank=None)


def _norms(model: nn.Module) -> bool:
    return any(isinstance(part, _BatchNorm) for part in model.modules())
