"""Two loops that people write themselves, for the benchmark `loop`. Neither records anything.

`train_plainly` is what tutorials teach: DataLoader over single items, `.item()` every step,
everything as it comes. `by_hand` is what an expert would write with the settings of a given
configuration; it takes nothing from this project but the model and the data.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

from trainer.config import Precision, RunConfig
from trainer.workloads.build import WORKLOADS
from trainer.workloads.images import ImageEntry, ImageFileDataset, task
from trainer.workloads.task import Split, Task, TensorSplit

TORCHS_THREADS = torch.get_num_threads()
"""What torch takes if nobody says anything, read before anybody does."""


class Images(Dataset[tuple[Tensor, int]]):
    """Images of a list, decoded and resized one at a time: uint8 (3, size, size), label."""

    def __init__(self, split: ImageFileDataset) -> None:
        self._folder: Path = split.folder
        self._entries: list[ImageEntry] = split.entries
        self._labels = split.labels.tolist()
        self._size = (split.size, split.size)

    def __len__(self) -> int:
        return len(self._entries)

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        with Image.open(self._folder / self._entries[index].path) as image:
            pixels = np.array(image.convert("RGB").resize(self._size, Image.Resampling.BILINEAR))
        return torch.from_numpy(pixels).permute(2, 0, 1), self._labels[index]


def train_plainly(
    config: RunConfig, model: nn.Module, train: Dataset[Any], validation: Dataset[Any]
) -> None:
    """Train as the tutorials do."""
    device = torch.device("cpu" if config.device == "cpu" else "cuda")
    model, loss_fn = model.to(device), nn.CrossEntropyLoss()
    train_loader = DataLoader(train, batch_size=config.batch_size, shuffle=True)
    validation_loader = DataLoader(validation, batch_size=config.batch_size)
    optimizer = torch.optim.Adam(model.parameters(), lr=config.learning_rate)
    losses = []
    for _ in range(config.epochs):
        model.train()
        for inputs, targets in train_loader:
            inputs, targets = inputs.to(device), targets.to(device)
            optimizer.zero_grad()
            loss = loss_fn(model(inputs), targets)
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
        model.eval()
        correct = 0
        with torch.no_grad():
            for inputs, targets in validation_loader:
                inputs, targets = inputs.to(device), targets.to(device)
                correct += (model(inputs).argmax(1) == targets).sum().item()


def images_plainly(config: RunConfig) -> float:
    """Train on image files as the tutorials do, with torch's own number of threads."""
    began = time.perf_counter()
    torch.set_num_threads(TORCHS_THREADS)
    torch.manual_seed(config.seed)
    workload = task(config)
    train, validation = (Images(split) for split in _splits(workload))
    train_plainly(config, workload.model, train, validation)
    return time.perf_counter() - began


def by_hand(config: RunConfig) -> float:
    """Train with the settings of `config`, without recording; return the seconds.

    Knows the precisions fp32 and bf16, channels_last and the number of threads. The optimizer is
    fused, the data are on the device.
    """
    began = time.perf_counter()
    torch.set_num_threads(config.num_threads)
    torch.manual_seed(config.seed)
    workload = WORKLOADS[config.workload](config)
    device = torch.device("cpu" if config.device == "cpu" else "cuda")
    layout = torch.channels_last if config.channels_last else torch.contiguous_format
    model = workload.model.to(device, memory_format=layout)  # type: ignore[call-overload]
    train, validation = (
        InMemory(*(part.to(device) for part in _tensors(split)), config.batch_size, shuffle=shuffle)
        for split, shuffle in ((workload.train, True), (workload.validation, False))
    )
    bf16 = config.precision is Precision.BF16
    precision = torch.autocast(device.type, dtype=torch.bfloat16) if bf16 else nullcontext()
    optimizer = torch.optim.Adam(model.parameters(), lr=config.learning_rate, fused=True)
    loss_fn = nn.CrossEntropyLoss()
    total = torch.zeros((), device=device)
    for _ in range(config.epochs):
        model.train()
        for inputs, targets in train:
            inputs = inputs.contiguous(memory_format=layout)
            with precision:
                loss = loss_fn(model(inputs), targets)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            total += loss.detach()
        model.eval()
        correct = torch.zeros((), device=device)
        with torch.inference_mode(), precision:
            for inputs, targets in validation:
                correct += (model(inputs).argmax(1) == targets).sum()
    (total + correct).item()  # what is queued is part of the training
    return time.perf_counter() - began


class InMemory:
    """Inputs and targets in two tensors on the device, iterated in batches."""

    def __init__(self, inputs: Tensor, targets: Tensor, batch_size: int, *, shuffle: bool) -> None:
        self._inputs, self._targets = inputs, targets
        self._batch_size, self._shuffle = batch_size, shuffle

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        count, device = len(self._targets), self._targets.device
        order = (torch.randperm if self._shuffle else torch.arange)(count, device=device)
        for indices in torch.split(order, self._batch_size):
            yield self._inputs[indices], self._targets[indices]


def _tensors(split: Split) -> tuple[Tensor, Tensor]:
    """Return all inputs and targets; images are decoded."""
    if isinstance(split, TensorSplit):
        return split.inputs, split.targets
    assert isinstance(split, ImageFileDataset)
    pictures, labels = zip(*Images(split), strict=True)
    return torch.stack(pictures), torch.tensor(labels)


def _splits(workload: Task) -> tuple[ImageFileDataset, ImageFileDataset]:
    assert isinstance(workload.train, ImageFileDataset)
    assert isinstance(workload.validation, ImageFileDataset)
    return workload.train, workload.validation
