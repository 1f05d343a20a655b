"""Matrix multiplication, and nearly nothing else: two square matrices learn to be inverses.

A sample is one product of two `width` × `width` matrices and the two products of its backward pass:
3 · 2 · width³ floating-point operations. Its input is one number, so nothing has to be loaded; what
else there is (the loss, the optimizer) grows with width² only. `batch_size` products share one
optimizer step.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from trainer.config import RunConfig
from trainer.workloads.task import Task, TensorSplit

SAMPLES = 512
VALIDATION_SAMPLES = 16


def task(config: RunConfig) -> Task:
    """Learn left · right = identity, each sample scaled by a number of its own."""
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
    """Takes scales (n,) and gives what is left to learn, scale · (left · right - 1), (n, w, w)."""

    def __init__(self, width: int) -> None:
        super().__init__()
        # Entries of the product are then about 0.1: small enough for 16 bits, and not the answer.
        spread = (0.1 / width**0.5) ** 0.5
        self.left = nn.Parameter(torch.randn(width, width) * spread)
        self.right = nn.Parameter(torch.randn(width, width) * spread)

    def forward(self, scales: Tensor) -> Tensor:
        """Return one difference a sample."""
        scales = scales.to(self.right.dtype)
        scaled = self.right * scales[:, None, None]
        product = torch.bmm(self.left.expand_as(scaled), scaled)
        ones = scales.to(product.dtype)[:, None].expand(product.shape[:2])
        return product - torch.diag_embed(ones)


def loss(differences: Tensor, targets: Tensor) -> Tensor:
    """Mean over all rows of their squared 2-norm; the differences are already those to `targets`.

    A mean over all elements would have gradients too small for 16 bits.
    """
    return differences.square().sum(dim=2).mean()


def _scales(samples: int, generator: torch.Generator) -> TensorSplit:
    """Numbers around 1, float32 (samples,), as inputs and targets."""
    scales = 0.5 + torch.rand(samples, generator=generator)
    return TensorSplit.of(scales, scales)
