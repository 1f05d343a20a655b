"""FSDP2: shards weights, gradients and optimizer state over the ranks.

Each block of the model, and the model around the blocks, is a group of parameters. It is gathered
for the forward and backward pass, and its gradients are reduce-scattered.
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
    """Put parameters that are created inside on the meta device, except on rank 0.

    `apply_fsdp` allocates them, ties included, and sends the values of rank 0. Buffers have values
    on all ranks. A custom workload is built in full on each rank, as it may need the values.
    """
    if not _sent_by_first(config) or not ranks.rank:
        yield
        return

    def without_memory(_module: nn.Module, _name: str, weights: nn.Parameter) -> nn.Parameter:
        return weights if weights.is_meta else _empty(weights, torch.device("meta"))

    # A hook may return a new parameter by torch's documentation, but not by its annotation.
    hook = register_module_parameter_registration_hook(without_memory)  # type: ignore[arg-type]
    try:
        yield
    finally:
        hook.remove()


def apply_fsdp(
    model: nn.Module, config: RunConfig, ranks: TrainerRank, device: torch.device
) -> None:
    """Shard a model over the ranks in place, before its optimizer is created.

    Groups of a model in host memory move to the device one by one, so it never holds the full
    model. Meta parameters receive the values of rank 0, one at a time. Raises RunFailedError for
    dtypes that FSDP cannot mix.
    """
    if param_dtype(config.precision) is not None and _norms(model):
        raise RunFailedError(
            f"precision: with {config.precision}, batch norm stays in 32 bits, but FSDP needs "
            f"one dtype per block. Choose {config.precision.removeprefix('pure_')} or ddp."
        )
    mesh = init_device_mesh(device.type, (ranks.world_size,))
    offload = CPUOffloadPolicy() if config.cpu_offload else OffloadPolicy()
    casts = casts_weights(model, config)
    # Gradients are reduced in 32 bits for any dtype of the gathered weights.
    inner = MixedPrecisionPolicy(autocast_dtype(config.precision) if casts else None, torch.float32)
    outer = MixedPrecisionPolicy(inner.param_dtype, torch.float32, torch.float32 if casts else None)
    whole = {name: weights.detach() for name, weights in model.named_parameters()}
    for module, policy in (*((block, inner) for block in blocks(model)), (model, outer)):
        _allocate(module, device)
        fully_shard(module, mesh=mesh, mp_policy=policy, offload_policy=offload)
    if _sent_by_first(config):
        _send_from_first(model, whole)


@torch.no_grad()
def _send_from_first(model: nn.Module, whole: Mapping[str, Tensor]) -> None:
    """Send each rank its shards of rank 0's parameters `whole`, by name."""
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


def _allocate(module: nn.Module, device: torch.device) -> None:
    """Replace meta parameters by uninitialized ones on the device; ties stay tied."""
    made: dict[nn.Parameter, nn.Parameter] = {}
    for part in module.modules():
        for name, weights in list(part.named_parameters(recurse=False)):
            if weights.is_meta:
                made.setdefault(weights, _empty(weights, device))
                part.register_parameter(name, made[weights])


def _empty(weights: nn.Parameter, device: torch.device) -> nn.Parameter:
    return nn.Parameter(torch.empty_like(weights, device=device), weights.requires_grad)


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
    # The device of the process group, which offloaded weights are not on.
    device = sharded.device_mesh.device_type
    return not ranks.sum(torch.tensor(float(broken), device=device)).item()


def local_shard(tensor: Tensor) -> Tensor:
    """Return this rank's shard of a tensor, in the same memory."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def whole(tensor: Tensor) -> Tensor:
    """Return the full tensor of all shards; all ranks must call this."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def _norms(model: nn.Module) -> bool:
    return any(isinstance(part, _BatchNorm) for part in model.modules())
