"""Pixels of encoded images, as their headers say."""

import struct

import numpy as np
import pytest
import tensorflow as tf

from towers.data.headers import check_pixels
from towers.errors import InputError

pytestmark = pytest.mark.unit

IMAGE = np.random.default_rng(0).integers(0, 256, (13, 17, 3)).astype(np.uint8)


def bmp(pixels):
    height, width = pixels.shape[:2]
    return struct.pack("<2s16xii", b"BM", width, -height) + bytes(3 * width * height)


def gif(num_pictures, width=17, height=13):
    """Return pictures whose colours are tables of two, and whose pixels are in two parts each."""
    picture = struct.pack("<BHHHHB", 0x2C, 0, 0, width, height, 0x80) + bytes(6)
    picture += b"\x02" + b"\x03abc" + b"\x02de" + b"\0"
    extension = b"\x21\xf9\x04abcd\0"
    screen = b"GIF89a" + struct.pack("<HHBBB", width, height, 0x80, 0, 0) + bytes(6)
    return screen + (extension + picture) * num_pictures + b"\x3b"


def webp(kind, size):
    return b"RIFF\0\0\0\0WEBP" + kind + bytes(4) + size


ENCODED = {
    "png": tf.io.encode_png(IMAGE).numpy(),
    "jpeg": tf.io.encode_jpeg(IMAGE).numpy(),
    "progressive jpeg": tf.io.encode_jpeg(IMAGE, progressive=True).numpy(),
    "jpeg with more": tf.io.encode_jpeg(IMAGE, xmp_metadata=b"\xff\xc0" * 500).numpy(),
    "bmp": bmp(IMAGE),
    "gif": gif(1),
    "webp": webp(b"VP8 ", bytes(6) + struct.pack("<HH", 17, 13)),
    "lossless webp": webp(b"VP8L", b"\x2f" + struct.pack("<I", 16 | 12 << 14)),
    "extended webp": webp(b"VP8X", bytes(4) + b"\x10\0\0\x0c\0\0"),
}


@pytest.mark.parametrize("kind", ENCODED)
def test_pixels_are_counted_before_they_are_decoded(kind):
    check_pixels("a", ENCODED[kind], 13 * 17)
    with pytest.raises(InputError) as error:
        check_pixels("big.image", ENCODED[kind], 13 * 17 - 1)
    assert str(error.value) == (
        "big.image has 221 pixels, 13x17 (height x width), and --max_image_pixels=220 are allowed: "
        "make it smaller, or allow more"
    )


def test_all_pictures_of_a_gif_count():
    content = gif(1000, 8000, 8000)
    assert len(content) < 50_000
    with pytest.raises(InputError, match="64,000,000,000 pixels, 8000x8000 .* in 1000 pictures"):
        check_pixels("a", content, 64_000_000)


@pytest.mark.parametrize("kind", ENCODED)
def test_what_has_no_header_is_no_image(kind):
    for content in (b"", b"text", ENCODED[kind][:9]):
        with pytest.raises(ValueError):
            check_pixels("a", content, 10**9)
