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
from trainer.datasets import data_path, data_root
from trainer.workloads.image_index import (
    ImageEntry,
    ImageError,
    ImageList,
    InvalidEntries,
    read_images,
    shown,
)
from trainer.workloads.task import Batch, Task

CHANNELS = (32, 64)
NAMED_CLASSES = 1000  # in run.json
FORMATS = ("PNG", "JPEG", "BMP", "GIF", "WEBP", "TIFF", "PPM")
MAX_PIXELS = 64 * 2**20  # 192 MiB decoded
GRAY_16 = frozenset(("I;16", "I;16B", "I;16L", "I;16N"))
SIXTEEN_BITS_AS_32 = frozenset(("PNG", "PPM"))

Pixels = NDArray[np.uint8]


def task(config: RunConfig) -> Task:
    """Return the task to classify the images of `dataset`. Raises ImageError."""
    try:
        path = data_path(data_root(), config.dataset)
    except ConfigError as error:
        raise ImageError(str(error)) from None
    broken = InvalidEntries(config.skip_unreadable)
    images = read_images(path, broken)
    train, validation = (
        ImageFileDataset.of(images, entries, config)
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
            "left_out": {"count": broken.count, "reasons": broken.reasons},
        },
        news=SkippedImageReporter((train, validation)),
    )


@dataclass(frozen=True, slots=True)
class ImageFileDataset:
    """Image files, decoded on demand; workers share the flags of unreadable images."""

    folder: Path
    entries: list[ImageEntry]
    labels: Tensor  # int64 (n,)
    size: int  # pixels a side
    skip: bool
    broken: Tensor  # bool (n,), in shared memory

    @classmethod
    def of(
        cls, images: ImageList, entries: list[ImageEntry], config: RunConfig
    ) -> ImageFileDataset:
        broken = torch.zeros(len(entries), dtype=torch.bool)
        broken.share_memory_()  # type: ignore[no-untyped-call]
        labels = images.labels(entries)
        return cls(
            images.folder, entries, labels, config.image_size, config.skip_unreadable, broken
        )

    @property
    def length(self) -> int:
        return len(self.entries)

    def take(self, indices: Tensor) -> Batch:
        """Return images as uint8 (n, 3, size, size) and labels as int64 (n,).

        An unreadable image raises ImageError, or is replaced by the next readable one with `skip`.
        """
        inputs, targets = self.room(len(indices))
        images = inputs.numpy()  # the same memory
        for row, index in enumerate(indices.tolist()):
            pixels, taken = self._readable(index)
            images[row] = pixels.transpose(2, 0, 1)
            targets[row] = self.labels[taken]
        return inputs, targets

    def room(self, size: int) -> Batch:
        images = torch.empty((size, 3, self.size, self.size), dtype=torch.uint8)
        return images, torch.empty(size, dtype=torch.int64)

    def _readable(self, index: int) -> tuple[Pixels, int]:
        """Return the image at `index`, or the next readable one, and its index."""
        for place in range(index, index + self.length):
            place %= self.length
            if self.skip and self.broken[place]:
                continue
            try:
                return decode_image(self.folder / self.entries[place].path, self.size), place
            except UnreadableImageError as error:
                if not self.skip:
                    raise ImageError(
                        f"{_sentence(self.entries[place], error)}. Replace the image, or switch "
                        "on skip_unreadable to leave out what is broken."
                    ) from error
                self.broken[place] = True
        raise ImageError(
            f"dataset: none of the {self.length:,} images can be decoded. Check the files, for "
            f"example {self.entries[0].where}."
        )


class SkippedImageReporter:
    """Reports images that were skipped since the last call."""

    def __init__(self, splits: tuple[ImageFileDataset, ...]) -> None:
        self._splits = splits
        self._reported = 0

    def __call__(self) -> list[str]:
        """Return a text with the number of skipped images and an example; empty without news."""
        broken = [split.broken.nonzero().flatten().tolist() for split in self._splits]
        count = sum(map(len, broken))
        if count <= self._reported:
            return []
        self._reported = count
        both = zip(self._splits, broken, strict=True)
        split, first = next((split, found[0]) for split, found in both if found)
        images = "1 image is" if count == 1 else f"{count:,} images are"
        return [f"{images} left out, for example {split.entries[first].where}"]


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


def _sentence(entry: ImageEntry, error: UnreadableImageError) -> str:
    name = "" if entry.where == shown(entry.path) else f" {shown(entry.path)}:"
    return f"{entry.where}:{name} {error}"


class UnreadableImageError(Exception):
    """An unreadable image; the message is the reason without the file name."""


def decode_image(path: Path, size: int) -> Pixels:
    """Return the first frame as uint8 (size, size, 3). Raises UnreadableImageError, MemoryError."""
    try:
        with Image.open(path, formats=FORMATS) as image:
            _check_size(image)
            # Decodes a JPEG at a fraction of its size if that is large enough.
            image.draft(None, (size, size))
            ImageOps.exif_transpose(image, in_place=True)
            return np.asarray(_in_color(image).resize((size, size), Image.Resampling.BILINEAR))
    except (UnreadableImageError, MemoryError):
        raise
    except FileNotFoundError:
        raise UnreadableImageError("it is not there any more") from None
    except Image.DecompressionBombError:
        raise UnreadableImageError(f"it has more than {MAX_PIXELS:,} pixels") from None
    except UnidentifiedImageError:
        raise UnreadableImageError(f"it is no image in one of {', '.join(FORMATS)}") from None
    except Exception as error:  # decoders raise nearly every kind for damaged files
        reason = f"it cannot be decoded ({first_line(error).rstrip('.')})"
        raise UnreadableImageError(reason) from error


def _check_size(image: Image.Image) -> None:
    pixels = image.width * image.height
    if pixels > MAX_PIXELS:
        raise UnreadableImageError(f"it has {pixels:,} pixels, {MAX_PIXELS:,} are allowed")
    if not pixels:
        raise UnreadableImageError("it has no pixels")


def _in_color(image: Image.Image) -> Image.Image:
    if image.mode in GRAY_16 or (image.mode == "I" and image.format in SIXTEEN_BITS_AS_32):
        image = Image.fromarray((np.asarray(image) >> 8).astype(np.uint8))
    elif image.mode in ("I", "F"):
        raise UnreadableImageError("it has 32-bit pixels, whose value range is unknown")
    if image.has_transparency_data:
        layer = image.convert("RGBA")
        white = Image.new("RGBA", layer.size, "white")
        return Image.alpha_composite(white, layer).convert("RGB")
    return image.convert("RGB")
