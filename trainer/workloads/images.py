"""A CNN image classifier on the user's image files.

Pillow decodes the images in each epoch, in `num_workers` processes. They reach the device as uint8,
a quarter of the bytes; mirroring and normalization on the device make a run independent of the
number of workers. Files are untrusted: only seven formats are tried, and sizes are checked before
decoding.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image, ImageOps, UnidentifiedImageError
from torch import Tensor, nn

from stepscope.common.config_issue import ConfigError
from stepscope.common.json_values import first_line
from trainer.config import RunConfig
from trainer.workloads.datasets import data_path, data_root
from trainer.workloads.image_index import ImageEntry, ImageError, read_images, shown
from trainer.workloads.task import Batch, Task

CHANNELS = (32, 64)
NAMED_CLASSES = 1000  # in run.json
FORMATS = ("PNG", "JPEG", "BMP", "GIF", "WEBP", "TIFF", "PPM")
MAX_PIXELS = 64 * 2**20  # 192 MiB decoded

Pixels = NDArray[np.uint8]


def task(config: RunConfig) -> Task:
    """Return the task to classify the images of `dataset`. Raises ImageError."""
    try:
        path = data_path(data_root(), config.dataset)
    except ConfigError as error:
        raise ImageError(str(error)) from None
    images = read_images(path)
    train, validation = (
        ImageFileDataset(images.folder, entries, images.labels(entries), config.image_size)
        for entries in (images.train, images.validation)
    )
    return Task(
        model=ImageCnn(config.image_size, len(images.classes), flip=config.horizontal_flip),
        train=train,
        validation=validation,
        loss=nn.CrossEntropyLoss(),
        run_info={
            "data": f"{config.dataset}: {train.length:,} images of {len(images.classes)} classes, "
            f"{validation.length:,} more held out",
            "classes": list(images.classes[:NAMED_CLASSES]),
        },
    )


@dataclass(frozen=True, slots=True)
class ImageFileDataset:
    """Image files, decoded on demand."""

    folder: Path
    entries: list[ImageEntry]
    labels: Tensor  # int64 (n,)
    size: int  # pixels a side

    @property
    def length(self) -> int:
        return len(self.entries)

    def take(self, indices: Tensor) -> Batch:
        """Return images as uint8 (n, 3, size, size) and labels as int64 (n,). Raises ImageError."""
        inputs = torch.empty((len(indices), 3, self.size, self.size), dtype=torch.uint8)
        images = inputs.numpy()  # the same memory
        for row, index in enumerate(indices.tolist()):
            images[row] = self._decoded(index).transpose(2, 0, 1)
        return inputs, self.labels.index_select(0, indices)

    def _decoded(self, index: int) -> Pixels:
        entry = self.entries[index]
        try:
            return decode_image(self.folder / entry.path, self.size)
        except UnreadableImageError as error:
            raise ImageError(
                f"{entry.where}: {shown(entry.path)}: {error}. Replace or remove the image."
            ) from error


class ImageCnn(nn.Module):
    """conv32-conv64-fc: maps uint8 images (n, 3, size, size) to class scores."""

    def __init__(self, size: int, classes: int, *, flip: bool) -> None:
        super().__init__()
        self.flip = flip
        # Pooling before ReLU is equivalent and cheaper.
        self.features = nn.Sequential(
            nn.Conv2d(3, CHANNELS[0], 3, padding=1),
            nn.MaxPool2d(2),
            nn.ReLU(),
            nn.Conv2d(CHANNELS[0], CHANNELS[1], 3, padding=1),
            nn.MaxPool2d(2),
            nn.ReLU(),
            nn.Flatten(),
        )
        self.head = nn.Linear(CHANNELS[1] * (size // 4) ** 2, classes)

    def forward(self, images: Tensor) -> Tensor:
        """Return the class scores (n, classes); mirrors half of the images while training."""
        if self.flip and self.training:
            mirrored = torch.rand(len(images), 1, 1, 1, device=images.device) < 0.5
            images = torch.where(mirrored, images.flip(3), images)
        scores: Tensor = self.head(self.features(images.to(self.head.weight.dtype) / 127.5 - 1))
        return scores


class UnreadableImageError(Exception):
    """An unreadable image; the message is the reason without the file name."""


def decode_image(path: Path, size: int) -> Pixels:
    """Return the first frame as uint8 (size, size, 3). Raises UnreadableImageError, MemoryError."""
    try:
        with Image.open(path, formats=FORMATS) as image:
            pixels = image.width * image.height
            if pixels > MAX_PIXELS:
                raise UnreadableImageError(f"it has {pixels:,} pixels, {MAX_PIXELS:,} are allowed")
            if image.mode.startswith(("I", "F")):
                raise UnreadableImageError("it has more than 8 bits per color; save it with 8")
            # Decodes a JPEG at a fraction of its size if that is large enough.
            image.draft(None, (size, size))
            ImageOps.exif_transpose(image, in_place=True)
            return np.asarray(_in_color(image).resize((size, size), Image.Resampling.BILINEAR))
    except (UnreadableImageError, MemoryError):
        raise
    except UnidentifiedImageError:
        raise UnreadableImageError(f"it is no image in one of {', '.join(FORMATS)}") from None
    except Exception as error:  # decoders raise nearly every kind for damaged files
        reason = f"it cannot be decoded ({first_line(error).rstrip('.')})"
        raise UnreadableImageError(reason) from error


def _in_color(image: Image.Image) -> Image.Image:
    """Return the image in RGB, with transparent parts in white."""
    if not image.has_transparency_data:
        return image.convert("RGB")
    layer = image.convert("RGBA")
    white = Image.new("RGBA", layer.size, "white")
    return Image.alpha_composite(white, layer).convert("RGB")
