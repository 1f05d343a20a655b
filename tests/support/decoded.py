"""A split in files for the tests of loading; workers import this module, so it imports little."""

from __future__ import annotations

import os
import random
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from trainer.workloads.task import Batch


@dataclass(frozen=True)
class Decoded:
    """Samples that lie in files, as an image data set's do: a value in each."""

    folder: Path
    length: int
    noisy: bool = False  # adds random numbers of all three kinds, as augmentations do

    def take(self, indices: Tensor) -> Batch:
        (self.folder / f"asked-{os.getpid()}-{indices.tolist()}").touch()
        values = [float((self.folder / str(index)).read_text()) for index in indices.tolist()]
        if self.noisy:
            noise = random.random() + np.random.rand()
            values = [value + noise + float(torch.rand(())) for value in values]
        return torch.tensor(values).view(-1, 1), indices

    def asked(self) -> dict[int, int]:
        """How many batches each process was asked for."""
        found: dict[int, int] = {}
        for path in self.folder.glob("asked-*"):
            pid = int(path.name.split("-")[1])
            found[pid] = found.get(pid, 0) + 1
        return found
