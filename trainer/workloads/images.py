"""A CNN image classifier on the user's image files.

Pillow decodes the images in each epoch, in `num_workers` processes. They reach the device as uint8,
a quarter of the bytes; mirroring and normalization on the device make a run independent of the
number of workers. Files are untrusted: only seven formats are tried, and paths, labels and sizes
are checked before decoding. An invalid entry ends the run with file, line and reason.
"""

from __future__ import annotations

import csv
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image, ImageOps, UnidentifiedImageError
from torch import Tensor, nn

from stepscope.common.config_issue import ConfigError
from stepscope.common.formatting import printable
from stepscope.common.json_values import first_line
from trainer.config import RunConfig
from trainer.errors import RunFailedError
from trainer.workloads.datasets import (
    IMAGE_SUFFIXES,
    TRAIN_CSV,
    TRAIN_FOLDER,
    VALIDATION_CSVS,
    VALIDATION_FOLDERS,
    DatasetLayout,
    data_path,
    data_root,
    form_of,
)
from trainer.workloads.task import Batch, Task

CHANNELS = (32, 64)
NAMED_CLASSES = 1000  # in run.json
FORMATS = ("PNG", "JPEG", "BMP", "GIF", "WEBP", "TIFF", "PPM")
MAX_PIXELS = 64 * 2**20  # 192 MiB decoded
PARTS = {"train": "train", "validation": "validation", "val": "validation", "test": "test"}
MAX_LABEL = 200  # characters
MAX_FILE_BYTES = 64 * 2**20
HELD_OUT = 5  # one image of five is for validation if the dataset has no validation split
SPLIT_SEED = 0  # fixed, so that validation images stay unseen after a resume

Pixels = NDArray[np.uint8]


class ImageError(RunFailedError):
    """An unusable dataset; the message has a remedy."""


class ImageEntry(NamedTuple):
    """An image in the index of a dataset; `where` is for messages, as "train.csv, line 7"."""

    path: str  # relative to the dataset's folder, with forward slashes
    label: str
    part: str  # "train", "validation", "test" (not used), or "" if unknown
    where: str


@dataclass(frozen=True, slots=True)
class ImageList:
    """The images of a dataset; `classes` are the class names in order."""

    folder: Path
    classes: tuple[str, ...]
    train: list[ImageEntry]
    validation: list[ImageEntry]

    def labels(self, entries: list[ImageEntry]) -> Tensor:
        """Return the class number of each entry, int64 (n,)."""
        numbers = {name: number for number, name in enumerate(self.classes)}
        return torch.tensor([numbers[entry.label] for entry in entries], dtype=torch.int64)


def task(config: RunConfig) -> Task:
    """Return the task to classify the images of `dataset`. Raises ImageError."""
    try:
        path = data_path(data_root(), config.dataset)
    except ConfigError as error:
        raise ImageError(str(error)) from None
    images = read_images(path)
    train, validation = (
        ImageFileDataset(images.folder, entries, images.labels(entries), config.image_size)
        for entries in (images.train, images.validation)
    )
    return Task(
        model=ImageCnn(config.image_size, len(images.classes), flip=config.horizontal_flip),
        train=train,
        validation=validation,
        loss=nn.CrossEntropyLoss(),
        run_info={
            "data": f"{config.dataset}: {train.length:,} images of {len(images.classes)} classes, "
            f"{validation.length:,} more held out",
            "classes": list(images.classes[:NAMED_CLASSES]),
        },
    )


@dataclass(frozen=True, slots=True)
class ImageFileDataset:
    """Image files, decoded on demand."""

    folder: Path
    entries: list[ImageEntry]
    labels: Tensor  # int64 (n,)
    size: int  # pixels a side

    @property
    def length(self) -> int:
        return len(self.entries)

    def take(self, indices: Tensor) -> Batch:
        """Return images as uint8 (n, 3, size, size) and labels as int64 (n,). Raises ImageError."""
        inputs = torch.empty((len(indices), 3, self.size, self.size), dtype=torch.uint8)
        images = inputs.numpy()  # the same memory
        for row, index in enumerate(indices.tolist()):
            images[row] = self._decoded(index).transpose(2, 0, 1)
        return inputs, self.labels.index_select(0, indices)

    def _decoded(self, index: int) -> Pixels:
        entry = self.entries[index]
        try:
            return decode_image(self.folder / entry.path, self.size)
        except UnreadableImageError as error:
            raise ImageError(
                f"{entry.where}: {shown(entry.path)}: {error}. Replace or remove the image."
            ) from error


class ImageCnn(nn.Module):
    """conv32-conv64-fc: maps uint8 images (n, 3, size, size) to class scores."""

    def __init__(self, size: int, classes: int, *, flip: bool) -> None:
        super().__init__()
        self.flip = flip
        # Pooling before ReLU is equivalent and cheaper.
        self.features = nn.Sequential(
            nn.Conv2d(3, CHANNELS[0], 3, padding=1),
            nn.MaxPool2d(2),
            nn.ReLU(),
            nn.Conv2d(CHANNELS[0], CHANNELS[1], 3, padding=1),
            nn.MaxPool2d(2),
            nn.ReLU(),
            nn.Flatten(),
        )
        self.head = nn.Linear(CHANNELS[1] * (size // 4) ** 2, classes)

    def forward(self, images: Tensor) -> Tensor:
        """Return the class scores (n, classes); mirrors half of the images while training."""
        if self.flip and self.training:
            mirrored = torch.rand(len(images), 1, 1, 1, device=images.device) < 0.5
            images = torch.where(mirrored, images.flip(3), images)
        scores: Tensor = self.head(self.features(images.to(self.head.weight.dtype) / 127.5 - 1))
        return scores


class UnreadableImageError(Exception):
    """An unreadable image; the message is the reason without the file name."""


def decode_image(path: Path, size: int) -> Pixels:
    """Return the first frame as uint8 (size, size, 3). Raises UnreadableImageError, MemoryError."""
    try:
        with Image.open(path, formats=FORMATS) as image:
            pixels = image.width * image.height
            if pixels > MAX_PIXELS:
                raise UnreadableImageError(f"it has {pixels:,} pixels, {MAX_PIXELS:,} are allowed")
            if image.mode.startswith(("I", "F")):
                raise UnreadableImageError("it has more than 8 bits per color; save it with 8")
            # Decodes a JPEG at a fraction of its size if that is large enough.
            image.draft(None, (size, size))
            ImageOps.exif_transpose(image, in_place=True)
            return np.asarray(_in_color(image).resize((size, size), Image.Resampling.BILINEAR))
    except (UnreadableImageError, MemoryError):
        raise
    except UnidentifiedImageError:
        raise UnreadableImageError(f"it is no image in one of {', '.join(FORMATS)}") from None
    except Exception as error:  # decoders raise nearly every kind for damaged files
        reason = f"it cannot be decoded ({first_line(error).rstrip('.')})"
        raise UnreadableImageError(reason) from error


def _in_color(image: Image.Image) -> Image.Image:
    """Return the image in RGB, with transparent parts in white."""
    if not image.has_transparency_data:
        return image.convert("RGB")
    layer = image.convert("RGBA")
    white = Image.new("RGBA", layer.size, "white")
    return Image.alpha_composite(white, layer).convert("RGB")


def read_images(path: Path) -> ImageList:
    """Return the images of a data set at `path`. Raises ImageError."""
    layout = form_of(path)
    try:
        if layout is DatasetLayout.CSV:
            return _image_list(path.parent, _csv_entries(path, ""))
        if layout is DatasetLayout.CSV_FOLDER:
            return _image_list(path, _both_parts(path / TRAIN_CSV, VALIDATION_CSVS, _csv_entries))
        class_entries = partial(_class_entries, path)
        if (path / TRAIN_FOLDER).is_dir():
            train = path / TRAIN_FOLDER
            return _image_list(path, _both_parts(train, VALIDATION_FOLDERS, class_entries))
        return _image_list(path, class_entries(path, ""))
    except OSError as error:
        raise ImageError(
            f"dataset: {shown(path.name)} cannot be read ({error.strerror}). Check its permissions."
        ) from error


def _image_list(folder: Path, entries: Iterable[ImageEntry]) -> ImageList:
    """Split the valid entries, by default a fixed random fifth to validate. Raises ImageError."""
    found = _checked(folder, entries)
    classes = sorted({entry.label for entry in found})
    if len(classes) < 2:
        raise ImageError(
            f"dataset: 2 classes or more are needed, got {len(classes)} with {len(found):,} "
            f"images. Check the labels in {folder.name}."
        )
    train = [entry for entry in found if entry.part != "validation"]
    validation = [entry for entry in found if entry.part == "validation"]
    if not validation:
        order = torch.randperm(len(train), generator=torch.Generator().manual_seed(SPLIT_SEED))
        held_out = set(order[: max(1, len(train) // HELD_OUT)].tolist())
        validation = [train[place] for place in sorted(held_out)]
        train = [entry for place, entry in enumerate(train) if place not in held_out]
    if not train:
        raise ImageError("dataset: every image is for validation. Give some the split train.")
    return ImageList(folder, tuple(classes), train, validation)


def shown(text: str) -> str:
    """Return untrusted text for a message: one line of at most 100 printable characters."""
    return printable(text[:100])


def _both_parts(
    train: Path, names: Sequence[str], read: Callable[[Path, str], Iterator[ImageEntry]]
) -> Iterator[ImageEntry]:
    """Yield the entries of `train` and of the first existing validation file or folder beside."""
    beside = [train.parent / name for name in names if (train.parent / name).exists()]
    yield from read(train, "train" if beside else "")
    for path in beside[:1]:
        yield from read(path, "validation")


def _csv_entries(path: Path, part: str) -> Iterator[ImageEntry]:
    """Yield rows of a CSV file; an empty `part` is read from the split column, if any."""
    if path.is_symlink():  # it may lead out of the data folder, and errors show lines of the file
        raise ImageError(f"dataset: {path.name} is a symbolic link. Put the file itself there.")
    try:
        with path.open(encoding="utf-8-sig", newline="") as file:
            rows = csv.DictReader(file, strict=True)
            header = rows.fieldnames or []
            if not {"path", "label"} <= set(header):
                raise ImageError(
                    f"{path.name}, line 1: columns named path and label are needed, got "
                    f"{shown(','.join(header))!r}. Write the names into the first line."
                )
            for row in rows:
                where = f"{path.name}, line {rows.line_num}"
                if None in row or None in row.values():
                    raise _invalid(where, f"it does not have the {len(header)} columns")
                given = part
                if "split" in row and not part:
                    given = PARTS.get(row["split"].strip().lower(), "unknown")
                name = os.path.normpath(row["path"].strip())
                yield ImageEntry(name, row["label"].strip(), given, where)
    except (UnicodeDecodeError, csv.Error) as error:
        raise ImageError(
            f"{path.name}: {error}. Save it as CSV in UTF-8, with closed quotation marks."
        ) from error


def _class_entries(root: Path, folder: Path, part: str) -> Iterator[ImageEntry]:
    """Yield the images of class folders by class; files that are no images are ignored."""
    for one_class in sorted(folder.iterdir()):
        if one_class.name.startswith("."):
            continue
        for parent, folders, names in os.walk(one_class):
            folders.sort()
            for name in sorted(names):
                suffix = os.path.splitext(name)[1].lower()
                if suffix in IMAGE_SUFFIXES and not name.startswith("."):
                    path = Path(parent, name).relative_to(root).as_posix()
                    yield ImageEntry(path, one_class.name.strip(), part, root.name)


def _checked(folder: Path, entries: Iterable[ImageEntry]) -> list[ImageEntry]:
    """Return the entries of train and validation. Raises ImageError for an invalid one."""
    root = os.path.realpath(folder)
    found: dict[str, ImageEntry] = {}
    for entry in entries:
        if entry.part == "test":
            continue
        reason = _path_problem(root, entry.path)
        if not 0 < len(entry.label) <= MAX_LABEL:
            reason = f"the label has {len(entry.label):,} characters, 1 to {MAX_LABEL} are allowed"
        if entry.part == "unknown":
            reason = "the split is not train, validation or test"
        if entry.path in found:
            reason = f"{shown(entry.path)} is already in {found[entry.path].where}"
        if reason is not None:
            raise _invalid(entry.where, reason)
        found[entry.path] = entry
    return list(found.values())


def _path_problem(root: str, path: str) -> str | None:
    """Return why a path is no image file inside the folder `root`; None if it is one."""
    name = shown(path)
    if not path.isprintable():
        return f"{name} is no valid file name"
    file = os.path.realpath(os.path.join(root, path))
    if not file.startswith(root + os.sep):
        return f"{name} is outside the folder of the dataset"
    if not os.path.isfile(file):
        return f"there is no file {name}"
    size = os.path.getsize(file)
    if not 0 < size <= MAX_FILE_BYTES:
        return f"{name} has {size:,} bytes, 1 to {MAX_FILE_BYTES:,} are allowed"
    return None


def _invalid(where: str, reason: str) -> ImageError:
    return ImageError(f"{where}: {reason}. Fix or remove it.")
