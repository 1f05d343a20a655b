"""Image files of every kind become three colors of 8 bits, or one sentence."""

from __future__ import annotations

import struct
import zlib
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from trainer.workloads.images import UnreadableImageError, decode_image

UPRIGHT = Image.new("RGB", (64, 32), (255, 0, 0))
"""Red, with a blue right half."""
UPRIGHT.paste((0, 0, 255), (32, 0, 64, 32))


def saved(folder: Path, image: Image.Image, name: str, **options: object) -> Path:
    path = folder / name
    image.save(path, **options)
    return path


@pytest.mark.parametrize("kind", ["PNG", "BMP", "GIF", "TIFF", "PPM", "WEBP", "JPEG"])
def test_all_formats_give_the_same_colors(tmp_path: Path, kind: str) -> None:
    path = saved(tmp_path, UPRIGHT, "no-suffix", format=kind, quality=95, subsampling=0)
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
    exif = Image.Exif()
    exif[0x0112] = 6  # to be turned by 90 degrees clockwise
    turned = UPRIGHT.transpose(Image.Transpose.ROTATE_90)
    path = saved(tmp_path, turned, "a.jpg", exif=exif, quality=95, subsampling=0)
    pixels = decode_image(path, 8)
    assert pixels[:, 0, 0].min() > 240
    assert pixels[:, -1, 2].min() > 240


@pytest.mark.parametrize("kind", ["PNG", "JPEG"])
def test_a_broken_file_is_a_reason(tmp_path: Path, kind: str) -> None:
    noise = np.random.default_rng(0).integers(0, 255, (64, 64, 3), dtype=np.uint8)
    path = saved(tmp_path, Image.fromarray(noise), "a.png", format=kind)
    whole = path.read_bytes()
    broken = [b"not an image at all", whole[:2000]]
    if kind == "PNG":  # which has a checksum
        broken.append(whole[:200] + bytes(60) + whole[260:])
    for content in broken:
        path.write_bytes(content)
        with pytest.raises(UnreadableImageError) as caught:
            decode_image(path, 8)
        assert str(tmp_path) not in str(caught.value)


@pytest.mark.parametrize(("side", "words"), [(9000, "81,000,000 pixels"), (50_000, "be decoded")])
def test_a_bomb_is_refused_before_it_is_decoded(tmp_path: Path, side: int, words: str) -> None:
    """A PNG of some bytes that would take gigabytes of memory."""
    header = b"IHDR" + struct.pack(">IIBBBBB", side, side, 8, 2, 0, 0, 0)
    check = struct.pack(">I", zlib.crc32(header))
    path = tmp_path / "bomb.png"
    path.write_bytes(b"\x89PNG\r\n\x1a\n\0\0\0\x0d" + header + check + b"\0\0\0\0IDAT")
    with pytest.raises(UnreadableImageError, match=words):
        decode_image(path, 8)
