"""A residual CNN like ResNet-18, on synthetic images of 224 pixels.

The stem reduces the image to a quarter per side, so most work is in convolutions with many
channels, which suit tensor cores. Architecture: He et al. 2015, arXiv 1512.03385, table 1, without
batch norm in the shortcuts.
"""

from __future__ import annotations

from torch import nn

from trainer.config import RunConfig
from trainer.workloads.memory_stress import ResidualCnn, synthetic_task
from trainer.workloads.task import Task

STAGES = 4


def task(config: RunConfig) -> Task:
    """Return a CNN of four stages, the first with `width` channels (64 in ResNet-18)."""
    width = config.width
    stem = nn.Sequential(
        nn.Conv2d(3, width, 7, stride=2, padding=3, bias=False),
        nn.BatchNorm2d(width),
        nn.ReLU(),
        nn.MaxPool2d(3, stride=2, padding=1),
    )
    return synthetic_task(config, ResidualCnn(stem, width, stages=STAGES))
