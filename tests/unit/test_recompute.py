"""Activation checkpointing: fewer activations kept, the same gradients, statistics and names."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from trainer.training.activation_checkpointing import apply_activation_checkpointing

IMAGES = torch.rand(4, 3, 8, 8)


class Residual(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm = nn.Conv2d(3, 3, 3, padding=1), nn.BatchNorm2d(3)

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.relu(self.norm(self.conv(x)))


class Custom(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = nn.Conv2d(3, 8, 3), nn.Conv2d(8, 3, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.two(torch.sigmoid(self.one(x).exp().log()))


def plain_layers() -> nn.Module:
    layers = [nn.Conv2d(3, 3, 3, padding=1), nn.Sigmoid(), nn.Dropout(0.5)]
    return nn.Sequential(*(copy.deepcopy(layer) for _ in range(3) for layer in layers))


def residual_blocks() -> nn.Module:
    return nn.Sequential(*(Residual() for _ in range(4)))


def kept_and_gradients(model: nn.Module, inputs: Tensor) -> tuple[int, list[Tensor]]:
    """Bytes that autograd keeps after the forward pass, and the gradients."""
    kept = 0

    def pack(saved: Tensor) -> Tensor:
        nonlocal kept
        kept += saved.numel() * saved.element_size()
        return saved

    torch.manual_seed(1)
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda saved: saved):
        outputs = model(inputs)
    outputs.square().mean().backward()
    return kept, [weights.grad for weights in model.parameters() if weights.grad is not None]


@pytest.mark.parametrize(("make", "blocks"), [(plain_layers, 2), (residual_blocks, 4), (Custom, 1)])
def test_less_is_kept_and_the_gradients_are_the_same(
    make: Callable[[], nn.Module], blocks: int
) -> None:
    torch.manual_seed(0)
    plain = make()
    model = copy.deepcopy(plain)
    assert apply_activation_checkpointing(model) == blocks
    assert model.state_dict().keys() == plain.state_dict().keys()
    kept, gradients = kept_and_gradients(model, IMAGES)
    kept_plain, gradients_plain = kept_and_gradients(plain, IMAGES)
    assert kept < 0.6 * kept_plain
    assert all(map(torch.equal, gradients, gradients_plain))
    # Batch norm has seen the batch once, though it computed twice.
    for ours, theirs in zip(model.buffers(), plain.buffers(), strict=True):
        assert torch.equal(ours, theirs)


def test_validation_computes_once() -> None:
    model, calls = Custom(), []
    model.one.register_forward_hook(lambda *_: calls.append(1))
    apply_activation_checkpointing(model)
    with torch.inference_mode():
        model(IMAGES)
    assert len(calls) == 1
    model(IMAGES).sum().backward()
    assert len(calls) == 3
