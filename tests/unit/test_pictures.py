"""Image files of every kind become three colors of 8 bits, or one sentence."""

from __future__ import annotations

import io
import struct
import zlib
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from trainer.workloads.images import UnreadableImageError, decode_image

RED_LEFT = np.zeros((8, 16, 3), np.uint8)
RED_LEFT[:, :8] = (255, 0, 0)
RED_LEFT[:, 8:] = (0, 0, 255)


def saved(folder: Path, image: Image.Image, name: str, **options: object) -> Path:
    path = folder / name
    image.save(path, **options)
    return path


@pytest.mark.parametrize("kind", ["PNG", "BMP", "GIF", "TIFF", "PPM", "WEBP", "JPEG"])
def test_all_formats_give_the_same_colors(tmp_path: Path, kind: str) -> None:
    image = Image.fromarray(RED_LEFT).resize((64, 32), Image.Resampling.NEAREST)
    path = saved(tmp_path, image, "no-suffix", format=kind, quality=95, subsampling=0)
    pixels = decode_image(path, 8)
    assert (pixels.shape, pixels.dtype) == ((8, 8, 3), np.uint8)
    assert np.abs(pixels[:, :3].astype(int) - (255, 0, 0)).max() <= 4
    assert np.abs(pixels[:, -3:].astype(int) - (0, 0, 255)).max() <= 4


@pytest.mark.parametrize(
    ("mode", "kind"), [("1", "PNG"), ("L", "PNG"), ("P", "PNG"), ("RGBA", "PNG"), ("CMYK", "JPEG")]
)
def test_every_color_mode_of_a_white_image_is_white(tmp_path: Path, mode: str, kind: str) -> None:
    path = saved(tmp_path, Image.new("RGB", (16, 16), "white").convert(mode), "a", format=kind)
    assert (decode_image(path, 8) >= 253).all()


@pytest.mark.parametrize("mode", ["I;16", "I", "F"])
def test_more_than_8_bits_per_color_are_refused(tmp_path: Path, mode: str) -> None:
    path = saved(tmp_path, Image.new(mode, (8, 8)), "a.tif")
    with pytest.raises(UnreadableImageError, match="more than 8 bits"):
        decode_image(path, 8)


def test_transparent_parts_are_white(tmp_path: Path) -> None:
    image = Image.new("RGBA", (16, 16), (255, 0, 0, 0))
    assert (decode_image(saved(tmp_path, image, "a.png"), 8) == 255).all()
    half = Image.new("RGBA", (16, 16), (0, 0, 0, 128))
    assert np.abs(decode_image(saved(tmp_path, half, "b.png"), 8).astype(int) - 127).max() <= 1


def test_a_camera_held_sideways_is_turned_upright(tmp_path: Path) -> None:
    upright = Image.fromarray(RED_LEFT).resize((64, 32), Image.Resampling.NEAREST)
    exif = Image.Exif()
    exif[0x0112] = 6  # to be turned by 90 degrees clockwise
    turned = upright.transpose(Image.Transpose.ROTATE_90)
    path = saved(tmp_path, turned, "a.jpg", exif=exif, quality=95, subsampling=0)
    pixels = decode_image(path, 8)
    assert pixels[:, 0, 0].min() > 240
    assert pixels[:, -1, 2].min() > 240


def broken_files() -> dict[str, tuple[bytes, str]]:
    def encoded(kind: str, **options: object) -> bytes:
        noise = np.random.default_rng(0).integers(0, 255, (64, 64, 3), dtype=np.uint8)
        buffer = io.BytesIO()
        Image.fromarray(noise).save(buffer, kind, **options)
        return buffer.getvalue()

    png, jpeg = encoded("PNG"), encoded("JPEG")
    damaged = bytearray(png)
    damaged[200:260] = b"\0" * 60
    unknown = "it is no image in one of PNG, JPEG"
    undecodable = "it cannot be decoded ("
    return {
        "text": (b"not an image at all", unknown),
        "half-png": (png[: len(png) // 2], undecodable),
        "half-jpeg": (jpeg[: len(jpeg) // 2], undecodable),
        "damaged-png": (bytes(damaged), undecodable),
    }


def test_a_broken_file_is_a_reason(tmp_path: Path, subtests: pytest.Subtests) -> None:
    path = tmp_path / "a.png"
    for name, (content, reason) in broken_files().items():
        with subtests.test(name):
            path.write_bytes(content)
            with pytest.raises(UnreadableImageError) as caught:
                decode_image(path, 8)
            assert reason in str(caught.value)
            assert "\n" not in str(caught.value)
            assert str(tmp_path) not in str(caught.value)


def test_a_bomb_is_refused_before_it_is_decoded(tmp_path: Path) -> None:
    """A PNG of some bytes that would take gigabytes of memory."""
    path = tmp_path / "bomb.png"
    for side, words in [(9000, "81,000,000 pixels"), (50_000, "it cannot be decoded")]:
        header = struct.pack(">IIBBBBB", side, side, 8, 2, 0, 0, 0)
        content = b"IHDR" + header
        path.write_bytes(
            b"\x89PNG\r\n\x1a\n"
            + struct.pack(">I", len(header))
            + content
            + struct.pack(">I", zlib.crc32(content))
            + b"\0\0\0\0IDAT"
        )
        with pytest.raises(UnreadableImageError, match=words):
            decode_image(path, 8)
