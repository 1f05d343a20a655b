"""Reads, validates and splits the index of an image dataset: CSV files or class folders.

Paths and labels are checked before any image is opened. An invalid entry ends the run with file,
line and reason.
"""

from __future__ import annotations

import csv
import io
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import NamedTuple

import torch

from stepscope.common.formatting import printable
from trainer.errors import RunFailedError
from trainer.workloads.datasets import (
    IMAGE_SUFFIXES,
    TRAIN_CSV,
    TRAIN_FOLDER,
    VALIDATION_CSVS,
    VALIDATION_FOLDERS,
    DatasetLayout,
    form_of,
)

PATH_NAMES = ("path", "image_path", "file", "filename", "image")
LABEL_NAMES = ("label", "target", "class")
SPLIT_NAMES = ("split",)
PARTS = {"train": "train", "validation": "validation", "val": "validation", "test": "test"}
MAX_CLASSES = 10_000
MAX_LABEL = 200  # characters
MAX_FILE_BYTES = 64 * 2**20
HELD_OUT = 5  # one image of five is for validation if the dataset has no validation split
SPLIT_SEED = 0  # fixed, so that validation images stay unseen after a resume


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

    def labels(self, entries: list[ImageEntry]) -> torch.Tensor:
        """Return the class number of each entry, int64 (n,)."""
        numbers = {name: number for number, name in enumerate(self.classes)}
        return torch.tensor([numbers[entry.label] for entry in entries], dtype=torch.int64)


def read_images(path: Path) -> ImageList:
    """Return the images of a data set at `path`. Raises ImageError."""
    layout = form_of(path)
    try:
        if layout is DatasetLayout.CSV:
            return image_list(path.parent, _csv_entries(path, ""))
        if layout is DatasetLayout.CSV_FOLDER:
            return image_list(path, _both_parts(path / TRAIN_CSV, VALIDATION_CSVS, _csv_entries))
        class_entries = partial(_class_entries, path)
        if (path / TRAIN_FOLDER).is_dir():
            train = path / TRAIN_FOLDER
            return image_list(path, _both_parts(train, VALIDATION_FOLDERS, class_entries))
        return image_list(path, class_entries(path, ""))
    except OSError as error:
        raise ImageError(
            f"dataset: {shown(path.name)} cannot be read ({error.strerror}). Check its permissions."
        ) from error


def image_list(folder: Path, entries: Iterable[ImageEntry]) -> ImageList:
    """Split the valid entries, by default a fixed random fifth to validate. Raises ImageError."""
    found = _checked(folder, entries)
    classes = sorted({entry.label for entry in found})
    if not 2 <= len(classes) <= MAX_CLASSES:
        raise ImageError(
            f"dataset: 2 to {MAX_CLASSES:,} classes are needed, got {len(classes):,} with "
            f"{len(found):,} images. Check the labels in {folder.name}."
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
        text = path.read_text(encoding="utf-8-sig")
    except UnicodeDecodeError as error:
        raise ImageError(f"{path.name}: {error}. Save the file as UTF-8.") from error
    first = text.partition("\n")[0]
    delimiter = max(",;\t", key=first.count)
    rows = csv.reader(io.StringIO(text, newline=""), delimiter=delimiter, strict=True)
    try:
        header = [cell.strip().lower() for cell in next(rows, [])]
        path_column, label_column, split_column = (
            _column(header, names) for names in (PATH_NAMES, LABEL_NAMES, SPLIT_NAMES)
        )
        if path_column is None or label_column is None:
            raise ImageError(
                f"{path.name}, line 1: columns named path and label are needed, got "
                f"{shown(first)!r}. Write the names into the first line."
            )
        for row in rows:
            if not any(cell.strip() for cell in row):
                continue
            where = f"{path.name}, line {rows.line_num}"
            if len(row) != len(header):
                raise _invalid(where, f"it has {len(row)} of the {len(header)} columns")
            given = part
            if split_column is not None and not part:
                given = PARTS.get(row[split_column].strip().lower(), "unknown")
            name = os.path.normpath(row[path_column].strip())
            yield ImageEntry(name, row[label_column].strip(), given, where)
    except csv.Error as error:
        raise ImageError(
            f"{path.name}, line {rows.line_num}: no valid CSV ({error}). "
            "Check for an unclosed quotation mark."
        ) from error


def _column(header: Sequence[str], names: Sequence[str]) -> int | None:
    return next((header.index(name) for name in names if name in header), None)


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
