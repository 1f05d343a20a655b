"""Writes real digits as image files: `python -m trainer.workloads.digit_images [FOLDER]`.

Writes 1,797 PNG files of 8×8 pixels, train.csv and validation.csv for the images workload into an
empty folder, by default `digits` in the data folder.
"""

from __future__ import annotations

import argparse
import errno
import sys
from pathlib import Path

import numpy as np
from PIL import Image
from sklearn.datasets import load_digits

from trainer.config import Workload
from trainer.workloads.datasets import VARIABLE, data_root
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
    folder = parser.parse_args().folder.resolve()
    try:
        write(folder)
    except OSError as error:
        reason = error.strerror or str(error)
        print(f"digit_images: {folder} cannot be written ({reason}).", file=sys.stderr)
        return 1
    print(
        f"1,797 images are in {folder}. Train on them: {VARIABLE}={folder.parent} stepscope ui\n"
        f"Then open http://localhost:8501/?workload={Workload.IMAGES}&dataset={folder.name}"
    )
    return 0


def write(folder: Path) -> None:
    """Write the files into a new or empty folder. Raises OSError."""
    digits = load_digits()
    names = [f"{IMAGES}/{number:04d}.png" for number in range(len(digits.target))]
    folder.mkdir(parents=True, exist_ok=True)
    if any(folder.iterdir()):
        raise FileExistsError(errno.ENOTEMPTY, "it is not empty")
    (folder / IMAGES).mkdir()
    for name, image in zip(names, digits.images, strict=True):
        shades = np.rint(image * (255 / 16)).astype(np.uint8)  # of 17 shades, 0 to 16
        Image.fromarray(shades).save(folder / name)
    for csv, part in zip(CSVS, parted(len(names)), strict=True):
        rows = "".join(f"{names[place]},{digits.target[place]}\n" for place in part.tolist())
        (folder / csv).write_text(f"path,label\n{rows}")


if __name__ == "__main__":
    sys.exit(main())
