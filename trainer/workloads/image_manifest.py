"""Validates the index of an image dataset and splits it into training and validation.

Paths, labels and file sizes are checked before any image is opened. An invalid entry ends the run
with file, line and reason; with `skip_unreadable` it is skipped and counted.
"""

from __future__ import annotations

import os
import re
import stat
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

import torch

from trainer.error_messages import RunFailedError

MAX_IMAGES = 1_000_000
MAX_CLASSES = 10_000
MAX_LABEL = 200  # characters
MAX_PATH = 1000  # characters
MAX_FILE_BYTES = 64 * 2**20
KEPT_REASONS = 10
HELD_OUT = 5  # one image of five is for validation if the dataset has no validation split
SPLIT_SEED = 0  # fixed, so that validation images stay unseen after a resume


class ImageError(RunFailedError):
    """An unusable dataset; the message has a remedy."""


class ImageEntry(NamedTuple):
    """An image in the index of a dataset; `where` is for messages, as "train.csv, line 7"."""

    path: str  # relative to the dataset's folder, with forward slashes
    label: str
    part: str  # "train", "validation", or "" if unknown
    where: str


@dataclass(slots=True)
class InvalidEntries:
    """Collects invalid entries; the first raises ImageError unless `skip` is on."""

    skip: bool
    count: int = 0
    reasons: list[str] = field(default_factory=list)

    def add(self, where: str, reason: str) -> None:
        """Count an invalid entry and store the first ten reasons."""
        sentence = reason if reason.startswith(where) else f"{where}: {reason}"
        if not self.skip:
            raise ImageError(
                f"{sentence}. Fix it, or turn on skip_unreadable to skip what cannot be read."
            )
        self.count += 1
        if len(self.reasons) < KEPT_REASONS:
            self.reasons.append(sentence)


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


def image_list(folder: Path, entries: Iterable[ImageEntry], broken: InvalidEntries) -> ImageList:
    """Validate the entries and split them. Raises ImageError.

    Without a validation split, a fixed random fifth of the images becomes one.
    """
    usable = _usable(folder, entries, broken)
    names = Counter(entry.label for entry in usable)
    if len(names) < 2:
        more = f"{broken.count:,} more are broken; the first is {next(iter(broken.reasons), '')}"
        raise ImageError(
            f"dataset: at least two classes are needed, got {len(names)} with {len(usable)} "
            f"images{f' ({more})' * bool(broken.count)}. Check the labels in {folder.name}."
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


def _usable(
    folder: Path, entries: Iterable[ImageEntry], broken: InvalidEntries
) -> list[ImageEntry]:
    """Return valid entries without duplicates."""
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
            broken.add(entry.where, reason)
            continue
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
