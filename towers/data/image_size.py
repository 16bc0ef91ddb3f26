"""Reads the number of pixels of an encoded image from its header.

Decoding needs memory for all of them: a file of a few kilobytes may need gigabytes.
"""

import importlib
import io
import struct

from towers.errors import InputError

# Pillow's plugins that read a header. `Image.open` has a limit of its own, for all programs.
_PLUGINS = {b"\xff\xd8\xff": "Jpeg", b"GIF8": "Gif", b"BM": "Bmp", b"RIFF": "WebP"}


def check_pixels(name: str, content: bytes, most: int) -> None:
    """Raise InputError if an image has too many pixels.

    Args:
        name: of the image, for the message.
        content: the encoded image.
        most: largest number of pixels; those of all pictures of a GIF count.

    Raises:
        InputError: it names the image, its pixels and the flag.
        ValueError: the header cannot be read.
    """
    pictures = 1
    try:
        if content.startswith(b"\x89PNG"):  # Pillow would also read text chunks
            width, height = struct.unpack_from(">II", content, 16)
        else:
            (kind,) = (kind for start, kind in _PLUGINS.items() if content.startswith(start))
            plugin = importlib.import_module(f"PIL.{kind}ImagePlugin")
            with getattr(plugin, f"{kind}ImageFile")(io.BytesIO(content)) as image:
                width, height = image.size
                # To reach the first picture of a GIF, a decoder reads all of them.
                pictures = image.n_frames if kind == "Gif" else 1
    except Exception:  # Pillow raises many kinds
        raise ValueError("no PNG, JPEG, BMP, GIF or WebP, or its header is damaged") from None
    pixels = width * height * pictures
    if pixels > most:
        several = f" in {pictures} pictures" if pictures > 1 else ""
        raise InputError(
            f"{name} has {pixels:,} pixels, {height}x{width} (height x width){several}, and "
            f"--max_image_pixels={most:,} are allowed: make it smaller, or allow more"
        )
