"""Which images a data set has, of which class, for training or for validation.

Every path, label and size is checked before any image is opened. What cannot be used is named with
its file, line and reason: it ends the run, or with `skip_unreadable` it is left out and counted.
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
HELD_OUT = 5  # one image of so many is for validation, where the data do not say which
SPLIT_SEED = 0  # the same for every run: validation must stay unseen after a resume


class ImageError(RunFailedError):
    """Images that cannot be used; the message is one sentence with a remedy."""


class ImageEntry(NamedTuple):
    """One image as a data set names it; `where` is "train.csv, line 7", for messages."""

    path: str  # relative to the data set's folder, with forward slashes
    label: str
    part: str  # "train", "validation", or "" where the data set does not say
    where: str


@dataclass(slots=True)
class InvalidEntries:
    """What cannot be used. The first one raises ImageError unless `skip` is on."""

    skip: bool
    count: int = 0
    reasons: list[str] = field(default_factory=list)

    def add(self, where: str, reason: str) -> None:
        """Count one, and keep its sentence if it is among the first ten."""
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
    """The images of a data set, class numbers as int64; `classes` are the names, in order."""

    folder: Path
    classes: tuple[str, ...]
    train: list[ImageEntry]
    validation: list[ImageEntry]
    repeated: int  # rows that say again what another row says

    def labels(self, entries: list[ImageEntry]) -> torch.Tensor:
        """Return the class number of each entry, int64 (n,)."""
        numbers = {name: number for number, name in enumerate(self.classes)}
        return torch.tensor([numbers[entry.label] for entry in entries], dtype=torch.int64)


def image_list(folder: Path, entries: Iterable[ImageEntry], broken: InvalidEntries) -> ImageList:
    """Check the entries and part them into training and validation. Raises ImageError.

    Where no entry is for validation, a fixed fifth of all images is, chosen at random.
    """
    usable, repeated = _usable(folder, entries, broken)
    names = Counter(entry.label for entry in usable)
    if len(names) < 2:
        raise ImageError(
            f"dataset: at least two classes are needed, got {len(names)} with {len(usable)} "
            f"images{_first_reason(broken)}. Check the labels in {folder.name}."
        )
    if len(names) > MAX_CLASSES:
        raise ImageError(
            f"dataset: at most {MAX_CLASSES:,} classes are possible, got {len(names):,}. "
            f"Look whether the labels in {folder.name} are names of classes."
        )
    train = [entry for entry in usable if entry.part != "validation"]
    validation = [entry for entry in usable if entry.part == "validation"]
    if not validation:
        train, validation = _parted(train)
    if not train:
        raise ImageError("dataset: every image is for validation. Give some the split train.")
    return ImageList(folder, _ordered(names), train, validation, repeated)


def _usable(
    folder: Path, entries: Iterable[ImageEntry], broken: InvalidEntries
) -> tuple[list[ImageEntry], int]:
    """Entries whose file is there and that contradict no other, each image once."""
    places = PathValidator(folder)
    found: dict[str, ImageEntry] = {}
    repeated = 0
    for entry in entries:
        reason = _label_reason(entry.label) or places.reason(entry.path)
        former = found.get(entry.path)
        if reason is None and former is not None:
            if (former.label, former.part) == (entry.label, entry.part):
                repeated += 1
                continue
            reason = f"{shown(entry.path)} is there already, in {former.where}, with another "
            reason += "label" if former.label != entry.label else "split"
        if reason is not None:
            broken.add(entry.where, reason)
            continue
        found[entry.path] = entry
        if len(found) > MAX_IMAGES:
            raise ImageError(
                f"dataset: at most {MAX_IMAGES:,} images are possible, {folder.name} has more. "
                "Name fewer of them in a CSV file."
            )
    return list(found.values()), repeated


class PathValidator:
    """Judges where an image lies: a real file inside the folder, on no way through a link."""

    def __init__(self, folder: Path) -> None:
        self._folder = str(folder)
        self._folders: dict[str, str | None] = {"": None}

    def reason(self, path: str) -> str | None:
        """Return why this path, relative to the folder, cannot be used; None if it can."""
        if not path:
            return "the path is empty"
        if len(path) > MAX_PATH:
            return f"the path has {len(path):,} characters, {MAX_PATH} are allowed"
        if path.startswith("/") or re.match(r"[A-Za-z]:", path):
            return f"{shown(path)} is absolute; paths are relative to the CSV file"
        if any(ord(letter) < 32 or ord(letter) == 127 for letter in path):
            return f"{shown(path)} has control characters"
        *parents, name = path.split("/")
        if ".." in parents or name in ("", ".", ".."):
            return f"{shown(path)} points outside the folder or at no file in it"
        for depth in range(1, len(parents) + 1):
            parent = "/".join(parents[:depth])
            if parent not in self._folders:
                self._folders[parent] = self._unusable(parent, "folder")
            if self._folders[parent] is not None:
                return self._folders[parent]
        return self._unusable(path, "file")

    def _unusable(self, path: str, kind: str) -> str | None:
        try:
            found = os.lstat(f"{self._folder}/{path}")
        except FileNotFoundError:
            return f"there is no {kind} {shown(path)}"
        except OSError as error:
            return f"{shown(path)} cannot be looked at ({error.strerror})"
        except ValueError:  # half of a character pair, which no file name can have
            return f"{shown(path)} cannot be the name of a file"
        if stat.S_ISLNK(found.st_mode):
            return f"{shown(path)} is a symbolic link; put the {kind} itself there"
        if kind == "folder":
            return None if stat.S_ISDIR(found.st_mode) else f"{shown(path)} is no folder"
        if not stat.S_ISREG(found.st_mode):
            return f"{shown(path)} is no file"
        if found.st_size > MAX_FILE_BYTES:
            return (
                f"{shown(path)} has {found.st_size / 2**20:,.0f} MiB, "
                f"{MAX_FILE_BYTES // 2**20} are allowed"
            )
        return None if found.st_size else f"{shown(path)} is empty"


def shown(text: str) -> str:
    """Return text from a file as a message can show it: one line, 100 characters at most."""
    text = "".join(letter if letter.isprintable() else "?" for letter in text[:101])
    return text if len(text) <= 100 else f"{text[:99]}…"


def _label_reason(label: str) -> str | None:
    if not label:
        return "the label is empty"
    if len(label) > MAX_LABEL:
        return f"the label has {len(label):,} characters, {MAX_LABEL} are allowed"
    return None


def _first_reason(broken: InvalidEntries) -> str:
    if not broken.count:
        return ""
    return f" ({broken.count:,} more are broken; the first is {broken.reasons[0]})"


def _ordered(names: Iterable[str]) -> tuple[str, ...]:
    """Class names sorted as numbers if all are whole numbers, else as text."""
    if all(re.fullmatch(r"-?[0-9]{1,18}", name) for name in names):
        return tuple(sorted(names, key=lambda name: (int(name), name)))
    return tuple(sorted(names))


def _parted(entries: list[ImageEntry]) -> tuple[list[ImageEntry], list[ImageEntry]]:
    """Train and validation: a random fifth is held out, at least one image."""
    order = torch.randperm(len(entries), generator=torch.Generator().manual_seed(SPLIT_SEED))
    cut = max(1, len(entries) // HELD_OUT)
    held_out = set(order[:cut].tolist())
    train = [entry for place, entry in enumerate(entries) if place not in held_out]
    return train, [entries[place] for place in sorted(held_out)]
