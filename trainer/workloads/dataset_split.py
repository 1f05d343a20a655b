"""A map-style torch Dataset as a split: samples become one batch by torch's own collation."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import default_collate

from trainer.workloads.custom_file import UserCodeError, UserFile, wrap_user_errors
from trainer.workloads.task import Batch

LIKE = {torch.float64: torch.float32}
"""Types that collation gives and models do not take: Python's numbers have 64 bits."""


def is_dataset(data: Any) -> bool:
    """Return True if `data` has a length and gives samples by number."""
    return hasattr(data, "__len__") and hasattr(data, "__getitem__")


@dataclass(frozen=True, slots=True)
class CollatedDataset:
    """A dataset of (input, target) pairs. Workers get a copy of it, so it must be picklable.

    `source` comes first: when a worker unpickles it, the classes of `dataset` become known.
    """

    source: UserFile
    dataset: Any
    name: str  # "train" or "validation", for messages
    length: int
    form: tuple[tuple[torch.Size, torch.dtype], tuple[torch.Size, torch.dtype]]

    @classmethod
    def of(cls, dataset: Any, name: str, source: UserFile) -> CollatedDataset:
        """The split of this dataset, whose first sample is looked at. Raises UserCodeError."""
        length = len(dataset)
        if length < 1:
            raise UserCodeError(f"workload: {name} has no samples. Look at the dataset.")
        inputs, targets = _batch([dataset[0]], name)
        form = ((inputs.shape[1:], inputs.dtype), (targets.shape[1:], targets.dtype))
        return cls(source, dataset, name, length, form)

    def take(self, indices: Tensor) -> Batch:
        """Return the samples at `indices` (int64, below `length`) as one batch.

        Raises UserCodeError with the line of the user's file where a sample cannot be made.
        """
        with wrap_user_errors(self.source.path, f"a sample of {self.name} cannot be made"):
            return _batch([self.dataset[place] for place in indices.tolist()], self.name)

    def room(self, size: int) -> Batch:
        """Return empty tensors for a batch of `size` samples."""
        inputs, targets = (torch.empty((size, *shape), dtype=dtype) for shape, dtype in self.form)
        return inputs, targets


def _batch(samples: list[Any], name: str) -> Batch:
    """Samples as one batch of two tensors; 64-bit fractions become 32-bit ones."""
    for sample in samples:
        if not isinstance(sample, (tuple, list)) or len(sample) != 2:
            raise UserCodeError(
                f"workload: each sample of {name} must be a pair of input and target, got "
                f"{type(sample).__name__}. Return (input, target) from the dataset."
            )
    parts = []
    for part in default_collate(samples):
        if not isinstance(part, Tensor):
            raise UserCodeError(
                f"workload: inputs and targets of {name} must be tensors, arrays or numbers, got "
                f"{type(part).__name__}. Turn them into tensors in the dataset."
            )
        parts.append(part.to(LIKE.get(part.dtype, part.dtype)))
    return parts[0], parts[1]
