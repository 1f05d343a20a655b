"""Finds image datasets in the data folder by file names; reads no file. Does not import torch.

A dataset is a path relative to the data folder (STEPSCOPE_DATA, by default `data/`):

- a CSV file of `path,label`;
- a folder with `train.csv` and optionally `validation.csv` or `val.csv`;
- a folder of class folders, or with such folders in `train/` and optionally in `val/`.
"""

from __future__ import annotations

import os
import re
import shlex
from collections.abc import Iterator
from enum import StrEnum
from itertools import islice
from pathlib import Path

from stepscope.common.config_issue import ConfigError, ConfigIssue
from trainer.config import SETTINGS, RunConfig, Workload, issue

VARIABLE = "STEPSCOPE_DATA"
IMAGE_SUFFIXES = frozenset(
    (".png", ".jpg", ".jpeg", ".bmp", ".gif", ".webp", ".tif", ".tiff", ".ppm", ".pgm")
)
TRAIN_CSV = "train.csv"
VALIDATION_CSVS = ("validation.csv", "val.csv")
TRAIN_FOLDER = "train"
VALIDATION_FOLDERS = ("val", "valid", "validation")
MAKE_DIGITS = "stepscope sample-data"
DEPTH = 3  # levels of the data folder that are searched
LOOKED_AT = 1000  # entries read per folder: class folders may hold a million files
OFFERED = 100  # datasets listed


class DatasetLayout(StrEnum):
    """How a dataset labels its images."""

    CSV = "csv"
    CSV_FOLDER = "folder with train.csv"
    CLASS_FOLDERS = "class folders"


def data_root() -> Path:
    """Return the data folder, which may not exist."""
    return Path(os.path.realpath(os.environ.get(VARIABLE) or "data"))


def data_sets(root: Path) -> list[str]:
    """Return at most 100 datasets under `root` as relative paths, sorted."""
    return sorted(islice(_found(root, root, DEPTH), OFFERED))


def form_of(path: Path) -> DatasetLayout | None:
    """Return the layout of this file or folder; None if it is no dataset."""
    # os.path: pathlib raises for a file without read permission.
    if os.path.isfile(path):
        return DatasetLayout.CSV if path.suffix.lower() == ".csv" else None
    if os.path.isfile(path / TRAIN_CSV):
        return DatasetLayout.CSV_FOLDER
    if _has_classes(path) or _has_classes(path / TRAIN_FOLDER):
        return DatasetLayout.CLASS_FOLDERS
    return None


def data_path(root: Path, name: str) -> Path:
    """Return the path of a dataset inside the data folder. Raises ConfigError if there is none."""
    path = Path(os.path.realpath(root / name))
    if name and path.is_relative_to(os.path.realpath(root)) and form_of(path) is not None:
        return path
    reason = f"no labeled images at {root / name}" if name else "no data set is chosen"
    if others := data_sets(root):
        raise ConfigError(issue("dataset", reason, f"Choose {' or '.join(others[:3])}"))
    # An absolute path, as the user may run the command in another folder.
    command = f"{MAKE_DIGITS} {shlex.quote(str(root / 'digits'))}"
    remedy = f"Create sample data (real digits as image files) with `{command}`"
    raise ConfigError(issue("dataset", reason, remedy))


def data_problem(config: RunConfig) -> ConfigIssue | None:
    """Return an issue if the dataset of this configuration is missing. Reads the disk."""
    if config.workload is Workload.IMAGES:
        try:
            data_path(data_root(), config.dataset)
        except ConfigError as error:
            return error.problem
    return None


def _found(root: Path, folder: Path, depth: int) -> Iterator[str]:
    """Yield the datasets in `folder`; of class folders only CSV files in them."""
    for entry in _entries(folder):
        name = entry.relative_to(root).as_posix()
        pattern = SETTINGS["dataset"].pattern or ""
        if entry.is_symlink() or not re.fullmatch(pattern, name):
            continue
        form = form_of(entry)
        if form is not None:
            yield name
        if form is DatasetLayout.CLASS_FOLDERS:
            yield from (name for name in _found(root, entry, 1) if name.endswith(".csv"))
        elif form is None and depth > 1:
            yield from _found(root, entry, depth - 1)


def _has_classes(folder: Path) -> bool:
    """Return True if at least two folders in `folder` hold images."""
    with_images = (
        entry
        for entry in _entries(folder)
        if any(file.suffix.lower() in IMAGE_SUFFIXES for file in _entries(entry))
    )
    return len(list(islice(with_images, 2))) == 2


def _entries(folder: Path) -> list[Path]:
    """Return up to 1000 visible entries of a folder, sorted; empty if it is unreadable."""
    try:
        with os.scandir(folder) as found:
            some = [Path(entry.path) for entry in islice(found, LOOKED_AT)]
    except OSError:
        return []
    return sorted(entry for entry in some if not entry.name.startswith("."))
