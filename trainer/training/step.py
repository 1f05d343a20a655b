"""The interface of an optimizer step, for what runs one: warm-up and CUDA Graphs."""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor


class OptimizerStep(Protocol):
    """An optimizer step of micro-batches; see `TrainStep` in trainer/train.py."""

    @property
    def optimizer(self) -> torch.optim.Optimizer: ...

    def __call__(
        self, inputs: Tensor, targets: Tensor, of: int = 0, last: bool = True
    ) -> tuple[Tensor, Tensor | None]: ...

    def forward(self, inputs: Tensor, targets: Tensor, of: int = 0) -> Tensor: ...

    def backward(self, loss: Tensor) -> None: ...

    def apply(self) -> Tensor | None: ...

    def evaluate(
        self, inputs: Tensor, targets: Tensor, counted: int | None = None
    ) -> tuple[Tensor, Tensor]: ...
