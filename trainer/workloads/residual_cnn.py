"""Residual CNNs on synthetic images: ResNet-18's shape, and a stress test of up to 140 GiB.

Memory grows with width × image_size² × batch_size (activations) and width² (weights). The images
are ten patterns with noise; an epoch repeats a pool of at most 32 MiB, so loading is cheap.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional

from trainer.config import RunConfig
from trainer.workloads.task import Task, TensorSplit

CLASSES = 10
POOL_BYTES = 32 * 2**20
POOL_IMAGES = 512
SIGNAL = 0.1  # weight of the pattern in an image; the rest is noise
EPOCH_SAMPLES = 1024
EPOCH_BATCHES = 32  # minimum, for large batches


def resnet_task(config: RunConfig) -> Task:
    """Return a CNN of four stages, the first with `width` channels (64 in ResNet-18).

    The stem reduces the image to a quarter per side, so most work is in convolutions with many
    channels, which suit tensor cores. Architecture: He et al. 2015, arXiv 1512.03385, table 1,
    without batch norm in the shortcuts.
    """
    stem = nn.Sequential(
        nn.Conv2d(3, config.width, 7, stride=2, padding=3, bias=False),
        nn.BatchNorm2d(config.width),
        nn.ReLU(),
        nn.MaxPool2d(3, stride=2, padding=1),
    )
    return _task(config, ResidualCnn(stem, config.width, stages=4))


def memory_stress_task(config: RunConfig) -> Task:
    """Return a CNN whose memory depends on `width` and `image_size`."""
    stem = nn.Conv2d(3, config.width, 3, padding=1, bias=False)
    return _task(config, ResidualCnn(stem, config.width, stages=3))


def _task(config: RunConfig, model: nn.Module) -> Task:
    """Return the task to classify ten noisy patterns."""
    generator = torch.Generator().manual_seed(config.seed)
    size = config.image_size
    patterns = torch.rand((CLASSES, 3, 4, 4), generator=generator)
    images, labels = _pool(patterns, size, generator)
    unseen, unseen_labels = _pool(patterns, size, generator)
    samples = max(EPOCH_SAMPLES, EPOCH_BATCHES * config.batch_size)
    samples -= samples % config.batch_size  # batch norm may not train on a small last batch
    return Task(
        model=model,
        train=TensorSplit(images, labels, samples),
        validation=TensorSplit(unseen, unseen_labels, samples // 16),
        loss=nn.CrossEntropyLoss(),
        run_info={
            "data": f"synthetic {size}×{size} images of {CLASSES} patterns",
            "synthetic": True,
        },
    )


class ResidualCnn(nn.Module):
    """Stages of two residual blocks; each stage after the first doubles channels, halves the image.

    Maps uint8 images (n, 3, size, size) to class scores. `stem` outputs `width` channels.
    """

    def __init__(self, stem: nn.Module, width: int, *, stages: int) -> None:
        super().__init__()
        self.stem = stem
        channels = [width << stage for stage in range(stages)]
        blocks = []
        for before, after in zip([width, *channels], channels, strict=False):
            blocks += [ResidualBlock(before, after), ResidualBlock(after, after)]
        self.blocks = nn.Sequential(*blocks)
        self.head = nn.Linear(channels[-1], CLASSES)

    def forward(self, images: Tensor) -> Tensor:
        """Return the class scores (n, classes)."""
        features = self.blocks(self.stem(images.to(self.head.weight.dtype) / 255))
        scores: Tensor = self.head(features.mean(dim=(2, 3)))
        return scores


class ResidualBlock(nn.Module):
    """Two 3×3 convolutions with batch norm around a shortcut."""

    def __init__(self, before: int, after: int) -> None:
        super().__init__()
        stride = after // before
        self.first = nn.Conv2d(before, after, 3, stride=stride, padding=1, bias=False)
        self.norm1 = nn.BatchNorm2d(after)
        self.second = nn.Conv2d(after, after, 3, padding=1, bias=False)
        self.norm2 = nn.BatchNorm2d(after)
        self.shortcut: nn.Module = nn.Identity()
        if stride > 1:
            self.shortcut = nn.Conv2d(before, after, 1, stride=stride, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """Return features (n, after, height / stride, width / stride)."""
        y = functional.relu(self.norm1(self.first(x)))
        return functional.relu(self.norm2(self.second(y)) + self.shortcut(x))


def _pool(patterns: Tensor, size: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Return images as uint8 (n, 3, size, size) and labels (n,)."""
    count = max(1, min(POOL_IMAGES, POOL_BYTES // (3 * size * size)))
    labels = torch.randint(len(patterns), (count,), generator=generator)
    images = torch.empty((count, 3, size, size), dtype=torch.uint8)
    scaled = functional.interpolate(patterns, size=(size, size))
    for image, label in zip(images, labels.tolist(), strict=True):
        noise = torch.rand(image.shape, generator=generator)
        image.copy_(255 * (SIGNAL * scaled[label] + (1 - SIGNAL) * noise))
    return images, labels
