"""Writes real digits as image files: `python -m trainer.workloads.digit_images [FOLDER]`.

Writes 1,797 PNG files of 8×8 pixels, train.csv and validation.csv for the images workload into an
empty folder, by default `digits` in the data folder.
"""

from __future__ import annotations

import argparse
import errno
import io
import os
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
from PIL import Image
from sklearn.datasets import load_digits

from trainer.config import Workload
from trainer.datasets import VARIABLE, data_root
from trainer.workloads.digits import parted

IMAGES = "images"
CSVS = ("train.csv", "validation.csv")


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="stepscope sample-data",
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
    except OSError as error:
        reason = error.strerror or str(error)
        print(f"digit_images: {folder} cannot be written ({reason}).", file=sys.stderr)
        return 1
    print(_next_command(folder))
    return 0


def write(folder: Path) -> Iterator[tuple[int, int]]:
    """Write the files into a new or empty folder; yield (images done, images). Raises OSError."""
    digits = load_digits()
    labels: list[int] = digits.target.tolist()
    names = [f"{IMAGES}/{number:04d}.png" for number in range(len(labels))]
    kept, held_out = parted(len(labels))
    folder.mkdir(parents=True, exist_ok=True)
    if any(folder.iterdir()):
        raise FileExistsError(errno.ENOTEMPTY, "it is not empty")
    (folder / IMAGES).mkdir()
    for done, (name, image) in enumerate(zip(names, digits.images, strict=True), 1):
        (folder / name).write_bytes(_png(image))
        if done % 100 == 0 or done == len(names):
            yield done, len(names)
    for csv, part in zip(CSVS, (kept.tolist(), held_out.tolist()), strict=True):
        rows = "".join(f"{names[place]},{labels[place]}\n" for place in part)
        (folder / csv).write_text(f"path,label\n{rows}")


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
        f"{folder} is ready. Train on it: {set_root}stepscope ui\n"
        f"Then open http://localhost:8501/?workload={Workload.IMAGES}&data={name}"
    )


if __name__ == "__main__":
    sys.exit(main())
