"""Reads, validates and splits the index of an image dataset: CSV files or class folders.

Paths, labels and file sizes are checked before any image is opened. An invalid entry ends the run
with file, line and reason.
"""

from __future__ import annotations

import csv
import io
import os
import re
import stat
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import torch

from trainer.datasets import (
    IMAGE_SUFFIXES,
    TRAIN_CSV,
    TRAIN_FOLDER,
    VALIDATION_CSVS,
    VALIDATION_FOLDERS,
    DatasetLayout,
    form_of,
)
from trainer.error_messages import RunFailedError

MAX_CSV_BYTES = 256 * 2**20
PATH_NAMES = ("path", "image_path", "file", "filename", "image")
LABEL_NAMES = ("label", "target", "class")
SPLIT_NAMES = ("split",)
PARTS = {
    **dict.fromkeys(("train", "training"), "train"),
    **dict.fromkeys(("validation", "val", "valid"), "validation"),
    "test": "test",  # not used
}
UTF_16 = (b"\xff\xfe", b"\xfe\xff")
MAX_IMAGES = 1_000_000
MAX_CLASSES = 10_000
MAX_LABEL = 200  # characters
MAX_PATH = 1000  # characters
MAX_FILE_BYTES = 64 * 2**20
HELD_OUT = 5  # one image of five is for validation if the dataset has no validation split
SPLIT_SEED = 0  # fixed, so that validation images stay unseen after a resume


def read_images(path: Path) -> ImageList:
    """Return the images of a data set at `path` (`trainer.datasets`). Raises ImageError."""
    form = form_of(path)
    try:
        if form is DatasetLayout.CSV:
            return image_list(path.parent, _csv_entries(path, ""))
        if form is DatasetLayout.CSV_FOLDER:
            return image_list(path, _csv_pair(path))
        return image_list(path, _class_folders(path))
    except OSError as error:
        raise ImageError(
            f"dataset: {shown(path.name)} cannot be read ({error.strerror}). Check its permissions."
        ) from error


def _csv_pair(folder: Path) -> Iterator[ImageEntry]:
    beside = [folder / name for name in VALIDATION_CSVS if (folder / name).is_file()]
    yield from _csv_entries(folder / TRAIN_CSV, "train" if beside else "")
    for path in beside[:1]:
        yield from _csv_entries(path, "validation")


def _csv_entries(path: Path, part: str) -> Iterator[ImageEntry]:
    """Yield rows of a CSV file; an empty `part` is read from the split column, if any."""
    text = _text(path)
    first = text.lstrip().partition("\n")[0]
    delimiter = max(",;\t", key=first.count)
    rows = csv.reader(io.StringIO(text, newline=""), delimiter=delimiter, strict=True)
    columns: _CsvColumns | None = None
    try:
        for row in rows:
            if not any(cell.strip() for cell in row):
                continue
            if columns is None:
                columns, is_header = _columns(path, row)
                if is_header:
                    continue
            where = f"{path.name}, line {rows.line_num}"
            entry = columns.entry(row, part, where)
            if entry.part != "test":
                yield entry
    except csv.Error as error:
        raise ImageError(
            f"{path.name}, line {rows.line_num}: no valid CSV ({error}). "
            "Check for an unclosed quotation mark."
        ) from error
    if columns is None:
        raise ImageError(f"dataset: {path.name} has no rows. It needs the columns path and label.")


def _text(path: Path) -> str:
    # It may lead out of the data folder, and errors show lines of the file.
    if path.is_symlink():
        raise ImageError(f"dataset: {path.name} is a symbolic link. Put the file itself there.")
    size = path.stat().st_size
    if size > MAX_CSV_BYTES:
        raise ImageError(
            f"dataset: {path.name} has {size / 2**20:,.0f} MiB, {MAX_CSV_BYTES // 2**20} are "
            "allowed. Split it into several."
        )
    content = path.read_bytes()
    encoding = "utf-16" if content.startswith(UTF_16) else "utf-8-sig"
    try:
        return content.decode(encoding)
    except UnicodeDecodeError as error:
        line = content.count(b"\n", 0, error.start) + 1
        raise ImageError(
            f"{path.name}, line {line}: not in {encoding.removesuffix('-sig').upper()} "
            f"(byte 0x{content[error.start]:02x}). Save the file as UTF-8."
        ) from error


class _CsvColumns:
    """The column numbers of path, label and, if any, split."""

    def __init__(self, path: int, label: int, split: int | None) -> None:
        self.path, self.label, self.split = path, label, split

    def entry(self, row: list[str], part: str, where: str) -> ImageEntry:
        """Return the entry of a row. Raises ImageError."""
        needed = max(self.path, self.label, self.split or 0) + 1
        if len(row) < needed:
            raise _invalid(where, f"it has {len(row)} of the {needed} columns")
        if self.split is not None and not part:
            value = row[self.split].strip()
            part = PARTS.get(value.lower(), "")
            if not part:
                reason = f"the split is {shown(value)!r}, not train, validation or test"
                raise _invalid(where, reason)
        return ImageEntry(
            _with_slashes(row[self.path].strip()), row[self.label].strip(), part, where
        )


def _with_slashes(path: str) -> str:
    """Convert backslashes of CSV files from Windows, and drop empty and "." parts."""
    parts = path.replace("\\", "/").split("/")
    return "/".join(part for place, part in enumerate(parts) if part != "." and (part or not place))


def _columns(path: Path, row: list[str]) -> tuple[_CsvColumns, bool]:
    """Return the columns by the first row, and whether the row is a header."""
    names = [cell.strip().lower() for cell in row]
    place, label, split = (
        next((names.index(name) for name in known if name in names), None)
        for known in (PATH_NAMES, LABEL_NAMES, SPLIT_NAMES)
    )
    if place is not None and label is not None:
        return _CsvColumns(place, label, split), True
    ends_like_image = os.path.splitext(row[0].strip().lower())[1] in IMAGE_SUFFIXES
    if place is None and label is None and len(row) in (2, 3) and ends_like_image:
        return _CsvColumns(0, 1, 2 if len(row) == 3 else None), False
    raise ImageError(
        f"{path.name}, line 1: columns named path and label are needed, got "
        f"{shown(', '.join(row))}. Write the names into the first line."
    )


def _class_folders(folder: Path) -> Iterator[ImageEntry]:
    """Yield the images of class folders by class; links are invalid, other files are ignored."""
    train = folder / TRAIN_FOLDER
    if not train.is_dir():
        yield from _classes(folder, folder, "")
        return
    beside = [folder / name for name in VALIDATION_FOLDERS if (folder / name).is_dir()]
    yield from _classes(folder, train, "train" if beside else "")
    for validation in beside[:1]:
        yield from _classes(folder, validation, "validation")


def _classes(root: Path, folder: Path, part: str) -> Iterator[ImageEntry]:
    for one_class in sorted(folder.iterdir()):
        if one_class.name.startswith(".") or not one_class.is_dir():
            continue
        if one_class.is_symlink():
            raise _invalid(one_class.relative_to(root).as_posix(), "it is a symbolic link")
        for parent, folders, names in os.walk(one_class):
            folders[:] = sorted(name for name in folders if not name.startswith("."))
            for name in sorted(names):
                suffix = os.path.splitext(name)[1].lower()
                if suffix in IMAGE_SUFFIXES and not name.startswith("."):
                    path = Path(parent, name).relative_to(root).as_posix()
                    yield ImageEntry(path, one_class.name.strip(), part, shown(path))


class ImageError(RunFailedError):
    """An unusable dataset; the message has a remedy."""


class ImageEntry(NamedTuple):
    """An image in the index of a dataset; `where` is for messages, as "train.csv, line 7"."""

    path: str  # relative to the dataset's folder, with forward slashes
    label: str
    part: str  # "train", "validation", or "" if unknown
    where: str


def _invalid(where: str, reason: str) -> ImageError:
    sentence = reason if reason.startswith(where) else f"{where}: {reason}"
    return ImageError(f"{sentence}. Fix or remove it.")


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


def image_list(folder: Path, entries: Iterable[ImageEntry]) -> ImageList:
    """Split the valid entries, by default a fixed random fifth to validate. Raises ImageError."""
    usable = _usable(folder, entries)
    names = Counter(entry.label for entry in usable)
    if len(names) < 2:
        raise ImageError(
            f"dataset: at least two classes are needed, got {len(names)} with {len(usable)} "
            f"images. Check the labels in {folder.name}."
        )
    if len(names) > MAX_CLASSES:
        raise ImageError(
            f"dataset: at most {MAX_CLASSES:,} classes are possible, got {len(names):,}. "
            f"Check that the labels in {folder.name} are names of classes."
        )
    train = [entry for entry in usable if entry.part != "validation"]
    validation = [entry for entry in usable if entry.part == "validation"]
    if not validation:
        order = torch.randperm(len(train), generator=torch.Generator().manual_seed(SPLIT_SEED))
        held_out = set(order[: max(1, len(train) // HELD_OUT)].tolist())
        validation = [train[place] for place in sorted(held_out)]
        train = [entry for place, entry in enumerate(train) if place not in held_out]
    if not train:
        raise ImageError("dataset: every image is for validation. Give some the split train.")
    return ImageList(folder, _ordered(names), train, validation)


def _usable(folder: Path, entries: Iterable[ImageEntry]) -> list[ImageEntry]:
    places = PathValidator(folder)
    found: dict[str, ImageEntry] = {}
    for entry in entries:
        reason, length = places.reason(entry.path), len(entry.label)
        if not 0 < length <= MAX_LABEL:
            reason = f"the label has {length:,} characters, 1 to {MAX_LABEL} are allowed"
        former = found.get(entry.path)
        if reason is None and former is not None:
            if (former.label, former.part) == (entry.label, entry.part):
                continue
            reason = (
                f"{shown(entry.path)} is already in {former.where}, with another label or split"
            )
        if reason is not None:
            raise _invalid(entry.where, reason)
        found[entry.path] = entry
        if len(found) > MAX_IMAGES:
            raise ImageError(
                f"dataset: at most {MAX_IMAGES:,} images are possible, {folder.name} has more. "
                "Name fewer of them in a CSV file."
            )
    return list(found.values())


class PathValidator:
    """Checks that a path is a regular file inside the folder, without symbolic links."""

    def __init__(self, folder: Path) -> None:
        self._root = os.path.realpath(folder)
        self._linked: dict[str, bool] = {"": False}

    def reason(self, path: str) -> str | None:
        """Return why a path relative to the folder is invalid; None if it is valid."""
        if not 0 < len(path) <= MAX_PATH:
            return f"the path has {len(path):,} characters, 1 to {MAX_PATH} are allowed"
        if path.startswith("/") or re.match(r"[A-Za-z]:", path):
            return f"{shown(path)} is absolute; paths are relative to the CSV file"
        if any(ord(letter) < 32 or ord(letter) == 127 for letter in path):
            return f"{shown(path)} has control characters"
        parent, _, name = path.rpartition("/")
        if ".." in parent.split("/") or name in ("", ".", ".."):
            return f"{shown(path)} points outside the folder or at no file in it"
        try:
            if parent not in self._linked:
                folder = f"{self._root}/{parent}"
                self._linked[parent] = os.path.realpath(folder) != os.path.normpath(folder)
            found = os.lstat(f"{self._root}/{path}")
        except FileNotFoundError:
            return f"there is no file {shown(path)}"
        except OSError as error:
            return f"{shown(path)} cannot be read ({error.strerror})"
        except ValueError:  # a lone surrogate
            return f"{shown(path)} is no valid file name"
        if self._linked[parent] or stat.S_ISLNK(found.st_mode):
            return f"{shown(path)} is a symbolic link or in a linked folder; put the file there"
        if not stat.S_ISREG(found.st_mode):
            return f"{shown(path)} is no file"
        if found.st_size > MAX_FILE_BYTES:
            return (
                f"{shown(path)} has {found.st_size / 2**20:,.0f} MiB, "
                f"{MAX_FILE_BYTES // 2**20} are allowed"
            )
        return None if found.st_size else f"{shown(path)} is empty"


def shown(text: str) -> str:
    """Return untrusted text for a message: one line of at most 100 printable characters."""
    text = "".join(letter if letter.isprintable() else "?" for letter in text[:101])
    return text if len(text) <= 100 else f"{text[:99]}…"


def _ordered(names: Iterable[str]) -> tuple[str, ...]:
    """Sort class names, by value if all are integers."""
    if all(re.fullmatch(r"-?[0-9]{1,18}", name) for name in names):
        return tuple(sorted(names, key=lambda name: (int(name), name)))
    return tuple(sorted(names))
