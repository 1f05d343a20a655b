"""A training script as the tutorials have it, turned into a workload of Stepscope.

    streamlit run app.py -- --workload examples/own_workload.py:build

The model and the dataset are the script's own. What its loop did (device, optimizer, AMP, loading,
checkpoints) Stepscope does, so only `build` is new: it says what there is to train.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.data import Dataset

from trainer.config import RunConfig
from trainer.workloads.task import Task

HIDDEN = 64


class TwoSpirals(Dataset[tuple[Tensor, int]]):
    """Points of two spirals that turn around each other; the target is the spiral."""

    def __init__(self, points: int, seed: int) -> None:
        random = np.random.default_rng(seed)
        self.spiral = random.integers(0, 2, points)
        angle = random.uniform(0.5, 2.0, points) * np.pi
        turned = angle + np.pi * self.spiral
        points_2d = np.stack([np.cos(turned), np.sin(turned)], axis=1) * angle[:, None] / 3
        self.points = points_2d + random.normal(0, 0.1, (points, 2))

    def __len__(self) -> int:
        return len(self.points)

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        return torch.tensor(self.points[index]), int(self.spiral[index])


def build(config: RunConfig) -> Task:
    """Return the model, the data and the loss; called once at the start of a run."""
    return Task(
        model=nn.Sequential(
            nn.Linear(2, HIDDEN),
            nn.Tanh(),
            nn.Linear(HIDDEN, HIDDEN),
            nn.Tanh(),
            nn.Linear(HIDDEN, 2),
        ),
        train=TwoSpirals(2000, seed=config.seed),
        validation=TwoSpirals(500, seed=config.seed + 1),
        loss=nn.CrossEntropyLoss(),
    )
