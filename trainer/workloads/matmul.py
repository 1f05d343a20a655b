"""Matrix multiplication: two square matrices learn to be inverses.

A sample is a product of two `width` × `width` matrices and two products in its backward pass:
3 · 2 · width³ floating-point operations. Its input is a single number; loss and optimizer grow with
width² only.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from trainer.config import RunConfig
from trainer.workloads.task import Task, TensorSplit

SAMPLES = 512
VALIDATION_SAMPLES = 16


def task(config: RunConfig) -> Task:
    """Return the task to learn left · right = identity, with a random scale per sample."""
    generator = torch.Generator().manual_seed(config.seed)
    width = config.width
    return Task(
        model=Product(width),
        train=_scales(SAMPLES, generator),
        validation=_scales(VALIDATION_SAMPLES, generator),
        loss=loss,
        classifies=False,
        run_info={
            "data": f"products of two {width} × {width} matrices, "
            f"{6 * width**3 / 1e9:.3g} GFLOP a sample forward and backward",
            "synthetic": True,
        },
    )


class Product(nn.Module):
    """Maps scales (n,) to the differences scale · (left · right - 1), shape (n, width, width)."""

    def __init__(self, width: int) -> None:
        super().__init__()
        # Entries of the product start at about 0.1: representable in 16 bits, far from identity.
        spread = (0.1 / width**0.5) ** 0.5
        self.left = nn.Parameter(torch.randn(width, width) * spread)
        self.right = nn.Parameter(torch.randn(width, width) * spread)

    def forward(self, scales: Tensor) -> Tensor:
        """Return a difference per sample."""
        scales = scales.to(self.right.dtype)
        scaled = self.right * scales[:, None, None]
        product = torch.bmm(self.left.expand_as(scaled), scaled)
        ones = scales.to(product.dtype)[:, None].expand(product.shape[:2])
        return product - torch.diag_embed(ones)


def loss(differences: Tensor, targets: Tensor) -> Tensor:
    """Return the mean squared 2-norm of rows; gradients of a mean of elements underflow fp16."""
    return differences.square().sum(dim=2).mean()


def _scales(samples: int, generator: torch.Generator) -> TensorSplit:
    """Return numbers from 0.5 to 1.5, float32 (samples,), as inputs and targets."""
    scales = 0.5 + torch.rand(samples, generator=generator)
    return TensorSplit.of(scales, scales)
