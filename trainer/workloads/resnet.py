"""A residual CNN in the shape of ResNet-18, on synthetic images of 224 pixels.

The first layers shrink the image to a quarter, as those for ImageNet do: most of the work is in
convolutions with many channels, which is what tensor cores are made for. `fill` keeps the full
image and is limited by memory traffic. Source of the shape: He et al. 2015, arXiv 1512.03385,
table 1; here without batch norm in the shortcuts.
"""

from __future__ import annotations

import torch
from torch import nn

from trainer.config import RunConfig
from trainer.workloads.memory_stress import ResidualCnn, synthetic_task
from trainer.workloads.task import Task

STAGES = 4


def task(config: RunConfig) -> Task:
    """Four stages that begin with `width` channels (64 in ResNet-18), for `classes` classes."""
    generator = torch.Generator().manual_seed(config.seed)
    model = ResidualCnn(
        _stem(config.width), config.width, stages=STAGES, classes=config.num_classes
    )
    return synthetic_task(config, model, config.num_classes, generator)


def _stem(width: int) -> nn.Sequential:
    return nn.Sequential(
        nn.Conv2d(3, width, 7, stride=2, padding=3, bias=False),
        nn.BatchNorm2d(width),
        nn.ReLU(),
        nn.MaxPool2d(3, stride=2, padding=1),
    )
