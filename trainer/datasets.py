"""Where image data lie, and what of them the page can offer. Reads names of files only.

A data set is a path relative to the data folder, which STEPSCOPE_DATA names (`data/` by default):

- a CSV file of `path,label`;
- a folder with `train.csv`, and perhaps `validation.csv` or `val.csv`;
- a folder of class folders, or with such folders in `train/`, and perhaps in `val/`.

This module does not import torch.
"""

from __future__ import annotations

import os
import shlex
from collections.abc import Iterator
from enum import StrEnum
from itertools import islice
from pathlib import Path

from trainer.config import ConfigError, ConfigIssue, RunConfig, Workload, either

VARIABLE = "STEPSCOPE_DATA"
IMAGE_SUFFIXES = frozenset(
    (".png", ".jpg", ".jpeg", ".bmp", ".gif", ".webp", ".tif", ".tiff", ".ppm", ".pgm")
)
TRAIN_CSV = "train.csv"
VALIDATION_CSVS = ("validation.csv", "val.csv")
TRAIN_FOLDER = "train"
VALIDATION_FOLDERS = ("val", "valid", "validation")
MAKE_DIGITS = "python -m trainer.workloads.digit_images"
DEPTH = 3  # folders below the data folder that are searched
LOOKED_AT = 1000  # entries of one folder: class folders may hold a million files
OFFERED = 100


class DatasetLayout(StrEnum):
    """How a data set says which image is of which class."""

    CSV = "csv"
    CSV_FOLDER = "folder with train.csv"
    CLASS_FOLDERS = "class folders"


def data_root() -> Path:
    """Return the folder of all data sets; it may not exist."""
    return Path(os.path.realpath(os.environ.get(VARIABLE) or "data"))


def data_sets(root: Path) -> list[str]:
    """Return the data sets under `root` as the field `data` takes them, sorted, 100 at most."""
    return sorted(islice(_found(root, root, DEPTH), OFFERED))


def form_of(path: Path) -> DatasetLayout | None:
    """Return how this file or folder describes images; None if it does not."""
    # os.path: a file that must not be read is no file, where pathlib raises.
    if os.path.isfile(path):
        return DatasetLayout.CSV if path.suffix.lower() == ".csv" else None
    if os.path.isfile(path / TRAIN_CSV):
        return DatasetLayout.CSV_FOLDER
    return (
        DatasetLayout.CLASS_FOLDERS
        if _has_classes(path) or _has_classes(path / TRAIN_FOLDER)
        else None
    )


def data_path(root: Path, name: str) -> Path:
    """Return the file or folder that `data` names. Raises ConfigError where there is none.

    A symbolic link that leads out of the data folder counts as none.
    """
    path = Path(os.path.realpath(root / name))
    if not name or not path.is_relative_to(os.path.realpath(root)) or form_of(path) is None:
        raise ConfigError(_absent(root, name))
    return path


def data_problem(config: RunConfig) -> ConfigIssue | None:
    """Return why the data of this configuration cannot be found, with the command that makes some.

    It looks at the disk, which `trainer.config_validation` does not.
    """
    if config.workload is not Workload.IMAGES:
        return None
    try:
        data_path(data_root(), config.dataset)
    except ConfigError as error:
        return error.problem
    return None


def _absent(root: Path, name: str) -> ConfigIssue:
    others = data_sets(root)
    reason = f"no labeled images at {root / name}" if name else "no data set is chosen"
    if others:
        return ConfigIssue("dataset", reason, f"Choose {either(others[:3])}")
    # With the whole path: the command may be given elsewhere than where the server was started.
    command = f"{MAKE_DIGITS} {shlex.quote(str(root / 'digits'))}"
    return ConfigIssue(
        "dataset", reason, f"Create sample data (real digits as image files) with `{command}`"
    )


def _found(root: Path, folder: Path, depth: int) -> Iterator[str]:
    """Data sets in `folder`; what is inside of one is not offered again."""
    for entry in _entries(folder):
        if entry.is_symlink() or not _nameable(entry.relative_to(root)):
            continue
        form = form_of(entry)
        if form is not None:
            yield entry.relative_to(root).as_posix()
        if form is DatasetLayout.CLASS_FOLDERS:  # perhaps with a table of the same images
            yield from (name for name in _found(root, entry, 1) if name.endswith(".csv"))
        elif form is None and depth > 1:
            yield from _found(root, entry, depth - 1)


def _nameable(path: Path) -> bool:
    try:
        RunConfig(dataset=path.as_posix())
    except ConfigError:
        return False
    return True


def _has_classes(folder: Path) -> bool:
    """Return True if at least two folders in `folder` hold images."""
    with_images = (entry for entry in _entries(folder) if _has_images(entry))
    return len(list(islice(with_images, 2))) == 2


def _has_images(folder: Path) -> bool:
    return any(entry.suffix.lower() in IMAGE_SUFFIXES for entry in _entries(folder))


def _entries(folder: Path) -> list[Path]:
    """Some of what lies in a folder, without hidden names; nothing where it cannot be read."""
    try:
        with os.scandir(folder) as found:
            some = [Path(entry.path) for entry in islice(found, LOOKED_AT)]
    except OSError:
        return []
    return sorted(entry for entry in some if not entry.name.startswith("."))
