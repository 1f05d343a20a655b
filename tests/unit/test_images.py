"""The image workload: batches, seeds, flips, what is left out, the command that writes digits."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from sklearn.datasets import load_digits

from trainer.config import RunConfig, Workload, defaults
from trainer.workloads import digit_images
from trainer.workloads.build import WORKLOADS
from trainer.workloads.datasets import VARIABLE
from trainer.workloads.digit_images import write
from trainer.workloads.images import ImageCnn, ImageFileDataset
from trainer.workloads.task import Task

CLASSES = 101


@pytest.fixture
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The data folder, with 202 images of 101 classes in `set/`, told apart by their color."""
    folder = tmp_path / "set"
    folder.mkdir()
    lines = ["path,label"]
    for number in range(2 * CLASSES):
        shade = number % CLASSES * 2
        Image.new("RGB", (6, 5), (shade, 255 - shade, shade // 2)).save(folder / f"{number}.png")
        lines.append(f"{number}.png,class {number % CLASSES}")
    (folder / "labels.csv").write_text("\n".join(lines))
    monkeypatch.setenv(VARIABLE, str(tmp_path))
    return tmp_path


def make(**changes: Any) -> tuple[Task, RunConfig]:
    torch.manual_seed(0)
    base = replace(defaults(Workload.IMAGES), dataset="set/labels.csv", image_size=8)
    config = replace(base, **changes)
    return WORKLOADS[Workload.IMAGES](config), config


def split(task: Task) -> ImageFileDataset:
    assert isinstance(task.train, ImageFileDataset)
    return task.train


def test_batches_are_small_numbers_with_their_classes(root: Path) -> None:
    task, _ = make()
    images, labels = task.train.take(torch.tensor([5, 0, 7]))
    assert (images.shape, images.dtype) == ((3, 3, 8, 8), torch.uint8)
    for image, label in zip(images, labels, strict=True):
        name = task.run_info["classes"][int(label)]
        assert image[0, 4, 4] == int(name.split()[1]) * 2
    assert task.model(images).shape == (3, CLASSES)
    assert (task.train.length, task.validation.length) == (162, 40)


def test_half_of_the_training_images_are_mirrored_and_none_in_validation() -> None:
    images = torch.randint(255, (400, 3, 8, 8), dtype=torch.uint8)
    seen: list[torch.Tensor] = []
    model = ImageCnn(8, 2, flip=True)
    model.features.register_forward_pre_hook(lambda module, inputs: seen.append(inputs[0]))
    torch.manual_seed(0)
    model(images)
    model.eval()
    model(images)
    training, validation = ((part + 1) * 127.5 for part in seen)
    torch.testing.assert_close(validation, images.float())
    mirrored = [torch.allclose(a, b.flip(2)) for a, b in zip(training, validation, strict=True)]
    kept = [torch.allclose(a, b) for a, b in zip(training, validation, strict=True)]
    assert 160 < sum(mirrored) < 240
    assert sum(mirrored) + sum(kept) == 400


def test_the_command_writes_the_real_digits(tmp_path: Path) -> None:
    folder = tmp_path / "new" / "digits"
    write(folder)
    digits = load_digits()
    with Image.open(folder / "images" / "0042.png") as image:
        assert np.array_equal(np.asarray(image), np.rint(digits.images[42] * 255 / 16))
    rows = [row for name in digit_images.CSVS for row in (folder / name).read_text().split()]
    assert len({*rows}) == 1 + 1797
    assert f"images/0042.png,{digits.target[42]}" in rows


def test_the_command_refuses_a_folder_with_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["digit_images", str(tmp_path / "new")])
    assert digit_images.main() == 0
    assert "?workload=images&dataset=new" in capsys.readouterr().out
    written = sorted((tmp_path / "new").rglob("*"))
    assert digit_images.main() == 1
    assert sorted((tmp_path / "new").rglob("*")) == written
