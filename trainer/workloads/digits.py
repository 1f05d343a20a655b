"""Handwritten digits: 1,797 real 8×8 images of scikit-learn, without a download.

A fifth of the images is for validation. The others are shifted by up to one pixel in nine versions,
so an epoch has 12,942 images.
"""

from __future__ import annotations

import importlib

import torch
from torch import Tensor, nn
from torch.nn import functional

from trainer.config import RunConfig
from trainer.workloads.task import Task, TensorSplit

HELD_OUT = 359
SPLIT_SEED = 0  # fixed, so that validation images stay unseen after a resume
HIDDEN = 256
FACTS = {"data": "scikit-learn digits: 1,797 real 8×8 images; training images also shifted by 1 px"}


def mlp_task(config: RunConfig) -> Task:
    """Return an MLP 64-256-10."""
    model = nn.Sequential(nn.Flatten(), nn.Linear(64, HIDDEN), nn.ReLU(), nn.Linear(HIDDEN, 10))
    return _task(model)


def cnn_task(config: RunConfig) -> Task:
    """Return a CNN of two convolutions and two linear layers, about 14,000 weights."""
    # Pooling before ReLU is equivalent and cheaper.
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
    return _task(model)


def _task(model: nn.Module) -> Task:
    train, validation = _splits()
    return Task(
        model=model, train=train, validation=validation, loss=nn.CrossEntropyLoss(), run_info=FACTS
    )


def _splits() -> tuple[TensorSplit, TensorSplit]:
    """Return images as float32 (n, 1, 8, 8) in 0..1 and labels as int64 (n,)."""
    # Deferred: the import takes a second.
    digits = importlib.import_module("sklearn.datasets").load_digits()
    images = torch.tensor(digits.images, dtype=torch.float32).unsqueeze(1) / 16
    labels = torch.tensor(digits.target, dtype=torch.int64)
    kept, held_out = parted(len(images))
    shifted = _shifted(images[kept])
    train = TensorSplit.of(shifted, labels[kept].repeat(len(shifted) // len(kept)))
    return train, TensorSplit.of(images[held_out], labels[held_out])


def parted(images: int) -> tuple[Tensor, Tensor]:
    order = torch.randperm(images, generator=torch.Generator().manual_seed(SPLIT_SEED))
    return order[HELD_OUT:], order[:HELD_OUT]


def _shifted(images: Tensor) -> Tensor:
    """Return all images shifted by -1, 0 and 1 pixels along both axes, padded with background."""
    padded = functional.pad(images, (1, 1, 1, 1))
    size = images.shape[-1]
    return torch.cat(
        [padded[:, :, y : y + size, x : x + size] for y in range(3) for x in range(3)]
    ).contiguous()
