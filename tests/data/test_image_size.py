"""Pixels of encoded images, as their headers say."""

import io
import struct

import numpy as np
import pytest
import tensorflow as tf
from PIL import Image

from towers.data.image_size import check_pixels
from towers.errors import InputError

pytestmark = pytest.mark.unit

IMAGE = np.random.default_rng(0).integers(0, 256, (13, 17, 3)).astype(np.uint8)


def saved(kind, **given):
    file = io.BytesIO()
    Image.fromarray(IMAGE).save(file, kind, **given)
    return file.getvalue()


def gif(num_pictures, width, height):
    """Return pictures whose colours are tables of two, and whose pixels are in two parts each."""
    picture = struct.pack("<BHHHHB", 0x2C, 0, 0, width, height, 0x80) + bytes(6)
    picture += b"\x02" + b"\x03abc" + b"\x02de" + b"\0"
    extension = b"\x21\xf9\x04abcd\0"
    screen = b"GIF89a" + struct.pack("<HHBBB", width, height, 0x80, 0, 0) + bytes(6)
    return screen + (extension + picture) * num_pictures + b"\x3b"


ENCODED = {kind: saved(kind) for kind in ("png", "jpeg", "bmp", "gif", "webp")} | {
    "progressive jpeg": saved("jpeg", progressive=True),
    "jpeg with more": tf.io.encode_jpeg(IMAGE, xmp_metadata=b"\xff\xc0" * 500).numpy(),
    "lossless webp": saved("webp", lossless=True),
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


def test_more_pixels_than_pillow_opens_can_be_allowed():
    content = gif(1, 60_000, 60_000)
    check_pixels("a", content, 3_600_000_000)
    with pytest.raises(InputError, match="3,600,000,000 pixels, 60000x60000 "):
        check_pixels("a", content, 64_000_000)


@pytest.mark.parametrize("kind", ENCODED)
def test_what_has_no_header_is_no_image(kind):
    for content in (b"", b"text", ENCODED[kind][:9]):
        with pytest.raises(ValueError):
            check_pixels("a", content, 10**9)
