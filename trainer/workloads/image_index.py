"""Reads the index of an image dataset: CSV files or class folders; `image_list` validates it."""

from __future__ import annotations

import csv
import io
import os
from collections.abc import Iterator
from pathlib import Path

from trainer.datasets import (
    IMAGE_SUFFIXES,
    TRAIN_CSV,
    TRAIN_FOLDER,
    VALIDATION_CSVS,
    VALIDATION_FOLDERS,
    DatasetLayout,
    form_of,
)
from trainer.workloads.image_manifest import (
    ImageEntry,
    ImageError,
    ImageList,
    InvalidEntries,
    image_list,
    shown,
)

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


def read_images(path: Path, broken: InvalidEntries) -> ImageList:
    """Return the images of a data set at `path` (`trainer.datasets`). Raises ImageError."""
    form = form_of(path)
    try:
        if form is DatasetLayout.CSV:
            return image_list(path.parent, _csv_entries(path, "", broken), broken)
        if form is DatasetLayout.CSV_FOLDER:
            return image_list(path, _csv_pair(path, broken), broken)
        return image_list(path, _class_folders(path, broken), broken)
    except OSError as error:
        raise ImageError(
            f"dataset: {shown(path.name)} cannot be read ({error.strerror}). Check its permissions."
        ) from error


def _csv_pair(folder: Path, broken: InvalidEntries) -> Iterator[ImageEntry]:
    beside = [folder / name for name in VALIDATION_CSVS if (folder / name).is_file()]
    yield from _csv_entries(folder / TRAIN_CSV, "train" if beside else "", broken)
    for path in beside[:1]:
        yield from _csv_entries(path, "validation", broken)


def _csv_entries(path: Path, part: str, broken: InvalidEntries) -> Iterator[ImageEntry]:
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
            entry = columns.entry(row, part, where, broken)
            if entry is not None and entry.part != "test":
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

    def entry(
        self, row: list[str], part: str, where: str, broken: InvalidEntries
    ) -> ImageEntry | None:
        """Return the entry of a row; None for an invalid row."""
        needed = max(self.path, self.label, self.split or 0) + 1
        if len(row) < needed:
            broken.add(where, f"it has {len(row)} of the {needed} columns")
            return None
        if self.split is not None and not part:
            value = row[self.split].strip()
            part = PARTS.get(value.lower(), "")
            if not part:
                broken.add(where, f"the split is {shown(value)!r}, not train, validation or test")
                return None
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


def _class_folders(folder: Path, broken: InvalidEntries) -> Iterator[ImageEntry]:
    """Yield the images of class folders by class; links are invalid, other files are ignored."""
    train = folder / TRAIN_FOLDER
    if not train.is_dir():
        yield from _classes(folder, folder, "", broken)
        return
    beside = [folder / name for name in VALIDATION_FOLDERS if (folder / name).is_dir()]
    yield from _classes(folder, train, "train" if beside else "", broken)
    for validation in beside[:1]:
        yield from _classes(folder, validation, "validation", broken)


def _classes(root: Path, folder: Path, part: str, broken: InvalidEntries) -> Iterator[ImageEntry]:
    for one_class in sorted(folder.iterdir()):
        if one_class.name.startswith(".") or not one_class.is_dir():
            continue
        if one_class.is_symlink():
            broken.add(one_class.relative_to(root).as_posix(), "it is a symbolic link")
            continue
        for parent, folders, names in os.walk(one_class):
            folders[:] = sorted(name for name in folders if not name.startswith("."))
            for name in sorted(names):
                suffix = os.path.splitext(name)[1].lower()
                if suffix in IMAGE_SUFFIXES and not name.startswith("."):
                    path = Path(parent, name).relative_to(root).as_posix()
                    yield ImageEntry(path, one_class.name.strip(), part, shown(path))
