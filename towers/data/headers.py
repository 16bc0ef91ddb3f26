"""How many pixels an encoded image has, read from its header: decoding takes memory for them all.

A few kilobytes can ask for gigabytes, whether somebody means harm or has scanned a map.
"""

import functools
import importlib
import io
import struct

from towers.errors import InputError

# The classes of Pillow's that read a header. `Image.open` has a limit of its own, for all programs.
_KINDS = {b"\xff\xd8\xff": "Jpeg", b"GIF8": "Gif", b"BM": "Bmp", b"RIFF": "WebP"}


def check_pixels(name: str, content: bytes, most: int) -> None:
    """Refuse an image of more pixels than `most`.

    Raises:
        InputError: it names the image, its pixels and the flag.
        ValueError: it has no header that can be read.
    """
    try:
        width, height, pictures = _size(content)
    except Exception:  # Pillow raises many kinds
        raise ValueError("no PNG, JPEG, BMP, GIF or WebP, or its header is damaged") from None
    pixels = width * height * pictures
    if pixels > most:
        several = f" in {pictures} pictures" if pictures > 1 else ""
        raise InputError(
            f"{name} has {pixels:,} pixels, {height}x{width} (height x width){several}, and "
            f"--max_image_pixels={most:,} are allowed: make it smaller, or allow more"
        )


def _size(content: bytes) -> tuple[int, int, int]:
    """Return width, height and number of pictures: to reach the first, all of a GIF's are read."""
    if content.startswith(b"\x89PNG"):  # at a fixed place, before texts that Pillow would read
        return *struct.unpack_from(">II", content, 16), 1
    (kind,) = (kind for start, kind in _KINDS.items() if content.startswith(start))
    with _reader(kind)(io.BytesIO(content)) as image:
        return *image.size, image.n_frames if kind == "Gif" else 1


@functools.cache
def _reader(kind: str) -> type:
    module = importlib.import_module(f"PIL.{kind}ImagePlugin")
    return getattr(module, f"{kind}ImageFile")
