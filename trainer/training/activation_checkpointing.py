"""Activation checkpointing: blocks of a model recompute their activations in the backward pass.

Replaces only the `forward` of the blocks, so parameters keep their names.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.utils.checkpoint import checkpoint, noop_context_fn

Forward = Callable[..., Tensor]


def apply_activation_checkpointing(model: nn.Module) -> int:
    """Checkpoint the blocks of a model and return their number.

    Blocks are submodules with children in a Sequential or ModuleList (residual blocks, transformer
    layers). A Sequential of n plain layers is split into about √n blocks; otherwise the whole model
    is one block.
    """
    count = 0
    for holder in _holders(model):
        found = blocks(holder)
        for block in found:
            _replace_forward(block, _recomputed(block.forward, [block]))
        count += len(found)
        if not found and isinstance(holder, nn.Sequential):
            runs = [nn.Sequential(*run) for run in _runs(list(holder))]
            # The backward pass would recompute the last run at once.
            forwards = [_recomputed(run.forward, [run]) for run in runs[:-1]]
            _replace_forward(holder, partial(_in_turn, [*forwards, runs[-1].forward]))
            count += len(forwards)
    if not count:
        _replace_forward(model, _recomputed(model.forward, [model]))
    return max(1, count)


def blocks(model: nn.Module) -> list[nn.Module]:
    """Return the submodules with children in the model's Sequentials and ModuleLists."""
    return [part for holder in _holders(model) for part in holder if _has_parts(part)]


def _replace_forward(module: nn.Module, forward: Forward) -> None:
    module.forward = forward


def _holders(model: nn.Module) -> Iterator[nn.Sequential | nn.ModuleList]:
    """Yield the outermost containers with more than two children, or with nested ones."""
    if isinstance(model, (nn.Sequential, nn.ModuleList)) and (
        len(model) > 2 or any(map(_has_parts, model))
    ):
        yield model
        return
    for part in model.children():
        yield from _holders(part)


def _has_parts(module: nn.Module) -> bool:
    return next(module.children(), None) is not None


def _runs(layers: Sequence[nn.Module]) -> list[Sequence[nn.Module]]:
    length = math.isqrt(len(layers) - 1) + 1
    return [layers[start : start + length] for start in range(0, len(layers), length)]


def _in_turn(forwards: Sequence[Forward], x: Tensor) -> Tensor:
    for forward in forwards:
        x = forward(x)
    return x


def _recomputed(forward: Forward, parts: Sequence[nn.Module]) -> Forward:
    norms = [norm for part in parts for norm in part.modules() if isinstance(norm, _BatchNorm)]

    def contexts() -> tuple[AbstractContextManager[None], AbstractContextManager[None]]:
        return nullcontext(), _statistics_kept(norms)

    def run(*inputs: Tensor) -> Tensor:
        if not torch.is_grad_enabled():  # validation stores no activations
            return forward(*inputs)
        context_fn = contexts if norms else noop_context_fn
        outputs: Tensor = checkpoint(forward, *inputs, use_reentrant=False, context_fn=context_fn)
        return outputs

    return run


@contextmanager
def _statistics_kept(norms: Sequence[_BatchNorm]) -> Iterator[None]:
    """Freeze the running statistics of batch norm, which have counted the batch already."""
    momenta = [(norm, norm.momentum, norm.num_batches_tracked) for norm in norms]
    for norm in norms:
        norm.momentum, norm.num_batches_tracked = 0.0, None
    try:
        yield
    finally:
        for norm, momentum, batches in momenta:
            norm.momentum, norm.num_batches_tracked = momentum, batches
