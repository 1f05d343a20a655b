"""Handwritten digits: 1,797 real 8×8 images that come with scikit-learn, no download.

A fifth of the images is kept for validation. Each of the others is shown in nine versions,
shifted by up to one pixel, so that an epoch is 12,942 images and the models learn for a while.
"""

from __future__ import annotations

import importlib

import torch
from torch import Tensor, nn
from torch.nn import functional

from trainer.config import RunConfig
from trainer.workloads.task import Task, TensorSplit

HELD_OUT = 359
SPLIT_SEED = 0  # the split is the same for every run: validation must stay unseen after a resume
HIDDEN = 256
FACTS = {"data": "scikit-learn digits: 1,797 real 8×8 images; training images also shifted by 1 px"}


def mlp_task(config: RunConfig) -> Task:
    """A perceptron 64-256-10, the tutorials' 784-256-10 for images of 64 pixels."""
    train, validation = _splits()
    model = nn.Sequential(nn.Flatten(), nn.Linear(64, HIDDEN), nn.ReLU(), nn.Linear(HIDDEN, 10))
    return _task(model, train, validation)


def cnn_task(config: RunConfig) -> Task:
    """Two convolutions and two linear layers, about 14,000 weights."""
    train, validation = _splits()
    # Pooling before ReLU gives the same values with a quarter of the ReLU work.
    model = nn.Sequential(
        nn.Conv2d(1, 16, 3, padding=1),
        nn.MaxPool2d(2),
        nn.ReLU(),
        nn.Conv2d(16, 32, 3, padding=1),
        nn.MaxPool2d(2),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(32 * 2 * 2, 64),
        nn.ReLU(),
        nn.Linear(64, 10),
    )
    return _task(model, train, validation)


def _task(model: nn.Module, train: TensorSplit, validation: TensorSplit) -> Task:
    return Task(
        model=model, train=train, validation=validation, loss=nn.CrossEntropyLoss(), run_info=FACTS
    )


def _splits() -> tuple[TensorSplit, TensorSplit]:
    """Images as float32 (n, 1, 8, 8) in 0..1, labels as int64 (n,)."""
    # Here, not above: the import takes a second, which runs of all other workloads would pay.
    digits = importlib.import_module("sklearn.datasets").load_digits()
    images = torch.tensor(digits.images, dtype=torch.float32).unsqueeze(1) / 16
    labels = torch.tensor(digits.target, dtype=torch.int64)
    kept, held_out = parted(len(images))
    shifted = _shifted(images[kept])
    train = TensorSplit.of(shifted, labels[kept].repeat(len(shifted) // len(kept)))
    return train, TensorSplit.of(images[held_out], labels[held_out])


def parted(images: int) -> tuple[Tensor, Tensor]:
    """Return the indices of the images to train on and of those held out."""
    order = torch.randperm(images, generator=torch.Generator().manual_seed(SPLIT_SEED))
    return order[HELD_OUT:], order[:HELD_OUT]


def _shifted(images: Tensor) -> Tensor:
    """All images moved by -1, 0 and 1 pixels along both axes, the rim filled with background."""
    padded = functional.pad(images, (1, 1, 1, 1))
    size = images.shape[-1]
    return torch.cat(
        [padded[:, :, y : y + size, x : x + size] for y in range(3) for x in range(3)]
    ).contiguous()
