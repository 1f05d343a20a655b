"""The interface of workloads: Task, Split and TensorSplit."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor, nn

Batch = tuple[Tensor, Tensor]  # inputs, targets
LossFunction = Callable[[Tensor, Tensor], Tensor]


@runtime_checkable
class Split(Protocol):
    """A split of a dataset; picklable, as worker processes get a copy."""

    @property
    def length(self) -> int:
        """Samples per epoch."""

    def take(self, indices: Tensor) -> Batch:
        """Return the samples at `indices` (int64, below `length`) as one batch."""


@dataclass(frozen=True, slots=True)
class TensorSplit:
    """A split in memory: `inputs` and `targets` have the same first dimension.

    If `length`, the samples per epoch, exceeds it, the tensors repeat.
    """

    inputs: Tensor
    targets: Tensor
    length: int

    @classmethod
    def of(cls, inputs: Tensor, targets: Tensor) -> TensorSplit:
        """Return a split with each sample once per epoch."""
        return cls(inputs, targets, len(inputs))

    def take(self, indices: Tensor) -> Batch:
        """Return the samples at `indices` (int64, below `length`) as one batch."""
        if self.length > len(self.inputs):
            indices = indices % len(self.inputs)
        return self.inputs.index_select(0, indices), self.targets.index_select(0, indices)


def empty_batch(split: Split, size: int, device: str = "cpu") -> Batch:
    """Return uninitialized tensors for `size` samples; loads one sample for the shapes."""
    inputs, targets = (
        torch.empty((size, *part.shape[1:]), dtype=part.dtype, device=device)
        for part in split.take(torch.zeros(1, dtype=torch.int64))
    )
    return inputs, targets


@dataclass(frozen=True, kw_only=True, slots=True)
class Task:
    """A model with its data and loss."""

    model: nn.Module
    train: Split
    validation: Split
    loss: LossFunction  # mean over the batch
    classifies: bool = True  # outputs are class scores, for the accuracy
    tokens_per_sample: int | None = None  # of a language model, for perf/tokens_per_sec
    recorded: Mapping[str, Tensor] = field(default_factory=dict)
    """Parameters of one element to record every step, by metric key."""
    run_info: Mapping[str, Any] = field(default_factory=dict)  # properties for run.json
