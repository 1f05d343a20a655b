"""Writes real digits as image files: `python -m trainer.workloads.digit_images [FOLDER]`.

Writes 1,797 PNG files of 8×8 pixels, train.csv and validation.csv for the images workload, without
changing existing files. FOLDER is by default `digits` in the data folder.
"""

from __future__ import annotations

import argparse
import io
import os
import re
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
from PIL import Image
from sklearn.datasets import load_digits

from stepscope.common.files import atomic_write, read_regular_file
from trainer.config import Workload
from trainer.datasets import VARIABLE, data_root
from trainer.workloads.digits import parted

IMAGES = "images"
CSVS = ("train.csv", "validation.csv")
_PART = re.compile(r"(?<![^/])\.([^/]+)\.[0-9a-f]{16}\.part$")
"""A partial file of a killed process."""


class ForeignFileError(Exception):
    """The folder contains a file that this command did not write."""


def main() -> int:
    """Write the files; return the exit code."""
    parser = argparse.ArgumentParser(
        prog="python -m trainer.workloads.digit_images",
        description="Write scikit-learn's 1,797 real digits as PNG files with CSV files of "
        "path,label, for the workload images.",
    )
    default = data_root() / "digits"
    parser.add_argument(
        "folder", nargs="?", type=Path, default=default, help=f"where to; default: {default}"
    )
    folder = Path(os.path.abspath(parser.parse_args().folder))
    try:
        for done, total in write(folder):
            if done == total or sys.stdout.isatty():
                end = "\r" if done < total else "\n"
                print(f"{done:,} of {total:,} images", end=end, flush=True)
    except ForeignFileError as error:
        print(f"digit_images: {error} Give an empty folder.", file=sys.stderr)
        return 1
    except OSError as error:
        reason = error.strerror or str(error)
        print(f"digit_images: {folder} cannot be written ({reason}).", file=sys.stderr)
        return 1
    print(_next_command(folder))
    return 0


def write(folder: Path) -> Iterator[tuple[int, int]]:
    """Write missing files, the CSV files last; yield (images done, images).

    Raises OSError, and ForeignFileError before the first write.
    """
    digits = load_digits()
    labels: list[int] = digits.target.tolist()
    names = [f"{IMAGES}/{number:04d}.png" for number in range(len(labels))]
    kept, held_out = parted(len(labels))
    tables = {
        csv: "path,label\n" + "".join(f"{names[place]},{labels[place]}\n" for place in part)
        for csv, part in zip(CSVS, (kept.tolist(), held_out.tolist()), strict=True)
    }
    _check(folder, names, tables)
    (folder / IMAGES).mkdir(parents=True, exist_ok=True)
    for done, (name, image) in enumerate(zip(names, digits.images, strict=True), 1):
        if not (folder / name).exists():
            atomic_write(folder / name, _png(image), durable=False)
        if done % 100 == 0 or done == len(names):
            yield done, len(names)
    for csv, text in tables.items():
        atomic_write(folder / csv, text, durable=False)


def _check(folder: Path, names: list[str], tables: dict[str, str]) -> None:
    """Raise ForeignFileError for a file in the folder that this command does not write."""
    if not folder.exists():
        return
    if not folder.is_dir():
        raise ForeignFileError(f"{folder} is a file.")
    known = {*names, *tables}
    for parent, folders, files in os.walk(folder):
        inside = os.path.relpath(parent, folder)
        for name in (*folders, *files):
            path = name if inside == "." else f"{inside}/{name}"
            link = os.path.islink(os.path.join(parent, name))
            expected = path == IMAGES if name in folders else _PART.sub(r"\1", path) in known
            if link or not expected:
                raise ForeignFileError(
                    f"{folder} holds {path}, which this command has not written."
                )
    for csv, text in tables.items():
        try:
            same = read_regular_file(folder / csv, len(text)) == text.encode()
        except FileNotFoundError:
            continue
        except (OSError, ValueError):
            same = False
        if not same:
            raise ForeignFileError(f"{folder / csv} has other rows than this command writes.")


def _png(image: np.ndarray) -> bytes:
    """Return an image of 17 shades (0 to 16) as an 8-bit gray PNG file."""
    buffer = io.BytesIO()
    Image.fromarray(np.rint(image * (255 / 16)).astype(np.uint8)).save(buffer, "PNG")
    return buffer.getvalue()


def _next_command(folder: Path) -> str:
    root = data_root()
    in_root = folder.is_relative_to(root) and folder != root
    root = root if in_root else folder.parent
    set_root = "" if in_root else f"{VARIABLE}={root} "
    name = folder.relative_to(root).as_posix()
    return (
        f"{folder} is ready. Train on it: {set_root}streamlit run app.py\n"
        f"Then open http://localhost:8501/?workload={Workload.IMAGES}&data={name}"
    )


if __name__ == "__main__":
    sys.exit(main())
