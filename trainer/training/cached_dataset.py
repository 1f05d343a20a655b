"""Samples that are decoded once and then stay in the host's memory."""

from __future__ import annotations

import psutil
import torch
from torch import Tensor

from stepscope.common.formatting import format_bytes
from trainer.error_messages import RunFailedError
from trainer.workloads.task import Batch, Split


class CachedDataset:
    """A split that asks another one for each sample once, when it is first taken.

    The other split gives the same sample each time, and one for each index, as images in files do.
    """

    def __init__(self, split: Split, ranks: int = 1) -> None:
        """Make room for all samples, as each of so many ranks on this host does.

        Raises RunFailedError if the host has less memory than that.
        """
        self._split = split
        inputs, targets = split.room(1)
        needed = split.length * (inputs.nbytes + targets.nbytes)
        free = psutil.virtual_memory().available
        if needed * ranks > free:
            each = f" in each of {ranks} processes" if ranks > 1 else ""
            raise RunFailedError(
                f"dataset_on_device: the decoded data set takes {format_bytes(needed)}{each}, and "
                f"{format_bytes(free)} of the host's memory are available. "
                "Switch off dataset_on_device."
            )
        self._inputs, self._targets = split.room(split.length)  # pages come as they are written
        self._kept = torch.zeros(split.length, dtype=torch.bool)

    @property
    def length(self) -> int:
        """Samples of an epoch."""
        return self._split.length

    def take(self, indices: Tensor) -> Batch:
        """Return the samples at `indices` (int64, below `length`) as one batch."""
        missing = indices[~self._kept[indices]]
        if len(missing):
            self._inputs[missing], self._targets[missing] = self._split.take(missing)
            self._kept[missing] = True
        return self._inputs.index_select(0, indices), self._targets.index_select(0, indices)

    def room(self, size: int) -> Batch:
        """Return empty tensors for a batch of `size` samples."""
        return self._split.room(size)
