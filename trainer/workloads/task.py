"""What a workload hands to the loop."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor, nn

Batch = tuple[Tensor, Tensor]  # inputs, targets
LossFunction = Callable[[Tensor, Tensor], Tensor]


@runtime_checkable
class Split(Protocol):
    """One split of a data set. Worker processes take from a copy of it, so it can be pickled."""

    @property
    def length(self) -> int:
        """Samples of an epoch."""

    def take(self, indices: Tensor) -> Batch:
        """Return the samples at `indices` (int64, below `length`) as one batch."""

    def room(self, size: int) -> Batch:
        """Return empty tensors for a batch of `size` samples."""


@dataclass(frozen=True, slots=True)
class TensorSplit:
    """A split that lies in memory: `inputs` and `targets` share their first dimension.

    `length` may be larger than the tensors, which then repeat; it is the samples of an epoch.
    """

    inputs: Tensor
    targets: Tensor
    length: int

    @classmethod
    def of(cls, inputs: Tensor, targets: Tensor) -> TensorSplit:
        """A split that counts each sample once."""
        return cls(inputs, targets, len(inputs))

    def take(self, indices: Tensor) -> Batch:
        """Return the samples at `indices` (int64, below `length`) as one batch."""
        if self.length > len(self.inputs):
            indices = indices % len(self.inputs)
        return self.inputs.index_select(0, indices), self.targets.index_select(0, indices)

    def room(self, size: int) -> Batch:
        """Return empty tensors for a batch of `size` samples."""
        inputs, targets = (
            torch.empty((size, *part.shape[1:]), dtype=part.dtype)
            for part in (self.inputs, self.targets)
        )
        return inputs, targets


@dataclass(frozen=True, kw_only=True, slots=True)
class Task:
    """A model with its data and loss; the model's initial weights come from the seed."""

    model: nn.Module
    train: Split
    validation: Split
    loss: LossFunction  # mean over the batch
    classifies: bool = True  # outputs are class scores, so accuracy means something
    tokens_per_sample: int | None = None  # of a language model, for perf/tokens_per_sec
    recorded: Mapping[str, Tensor] = field(default_factory=dict)
    """Parameters of one element recorded every step, by metric key."""
    run_info: Mapping[str, Any] = field(default_factory=dict)
    """What the page should know about the data, for run.json."""
    news: Callable[[], Sequence[str]] = list
    """Asked at the end of each epoch for sentences that become events: what was left out since."""
