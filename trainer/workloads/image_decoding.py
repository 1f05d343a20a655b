"""Decodes image files of seven formats to RGB pixels of one size.

Files are untrusted: only these formats are tried, sizes are checked before decoding, and any
exception of Pillow becomes an UnreadableImageError.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from PIL import Image, ImageOps, UnidentifiedImageError

from stepscope.common.json_values import first_line

FORMATS = ("PNG", "JPEG", "BMP", "GIF", "WEBP", "TIFF", "PPM")
MAX_PIXELS = 64 * 2**20  # 192 MiB decoded
GRAY_16 = frozenset(("I;16", "I;16B", "I;16L", "I;16N"))
SIXTEEN_BITS_AS_32 = frozenset(("PNG", "PPM"))

Pixels = NDArray[np.uint8]


class UnreadableImageError(Exception):
    """An unreadable image; the message is the reason without the file name."""


def decode_image(path: Path, size: int) -> Pixels:
    """Return the first frame as uint8 (size, size, 3), upright and resized to a square.

    Transparency becomes white, 16-bit gray is scaled to 8 bits. Raises UnreadableImageError and
    MemoryError.
    """
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
    """Convert the image to 8-bit RGB."""
    if image.mode in GRAY_16 or (image.mode == "I" and image.format in SIXTEEN_BITS_AS_32):
        image = Image.fromarray((np.asarray(image) >> 8).astype(np.uint8))
    elif image.mode in ("I", "F"):
        raise UnreadableImageError("it has 32-bit pixels, whose value range is unknown")
    if image.has_transparency_data:
        layer = image.convert("RGBA")
        white = Image.new("RGBA", layer.size, "white")
        return Image.alpha_composite(white, layer).convert("RGB")
    return image.convert("RGB")
