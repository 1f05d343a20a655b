"""What a workload hands to the loop."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

Batch = tuple[Tensor, Tensor]  # inputs, targets
LossFunction = Callable[[Tensor, Tensor], Tensor]


@dataclass(frozen=True, slots=True)
class Split:
    """One split of a data set: `inputs` and `targets` share their first dimension.

    `length` may be larger than the tensors, which then repeat; it is the samples of an epoch.
    """

    inputs: Tensor
    targets: Tensor
    length: int

    @classmethod
    def of(cls, inputs: Tensor, targets: Tensor) -> Split:
        """A split that counts each sample once."""
        return cls(inputs, targets, len(inputs))

    def take(self, indices: Tensor, out: Batch | None = None) -> Batch:
        """Return the samples at `indices` (int64, below `length`) as one batch, into `out`."""
        if self.length > len(self.inputs):
            indices = indices % len(self.inputs)
        inputs, targets = out or (None, None)
        return (
            torch.index_select(self.inputs, 0, indices, out=inputs),
            torch.index_select(self.targets, 0, indices, out=targets),
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class Task:
    """A model with its data and loss; the model's initial weights come from the seed."""

    model: nn.Module
    train: Split
    validation: Split
    loss: LossFunction  # mean over the batch
    classifies: bool = True  # outputs are class scores, so accuracy means something
    recorded: Mapping[str, Tensor] = field(default_factory=dict)
    """Parameters of one element recorded every step, by metric key."""
    run_info: Mapping[str, Any] = field(default_factory=dict)
    """What the page should know about the data, for run.json."""
