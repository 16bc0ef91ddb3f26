"""How many pixels an encoded image has, read from its header: decoding takes memory for them all.

A few kilobytes can ask for gigabytes, whether somebody means harm or has scanned a map.
"""

import struct

from towers.errors import InputError

_NOT_OF_SIZE = {0xC4, 0xC8, 0xCC}  # among the markers of JPEG that begin a frame


def check_pixels(name: str, content: bytes, most: int) -> None:
    """Refuse an image of more pixels than `most`.

    Raises:
        InputError: it names the image, its pixels and the flag.
        ValueError: of other kinds, struct.error too: it has no header that can be read.
    """
    try:
        pixels, text = _pixels(content)
    except (struct.error, IndexError):
        raise ValueError("the header is damaged") from None
    if pixels > most:
        raise InputError(
            f"{name} has {pixels:,} pixels, {text}, and --max_image_pixels={most:,} are allowed: "
            "make it smaller, or allow more"
        )


def _pixels(content: bytes) -> tuple[int, str]:
    """Return how many pixels a decoder makes, and their layout in words."""
    if content.startswith(b"\x89PNG"):
        width, height = struct.unpack_from(">II", content, 16)
    elif content.startswith(b"\xff\xd8\xff"):
        width, height = _of_jpeg(content)
    elif content.startswith(b"GIF8"):
        return _of_gif(content)
    elif content.startswith(b"BM"):
        width, height = map(abs, struct.unpack_from("<ii", content, 18))
    elif content[8:12] == b"WEBP":
        width, height = _of_webp(content)
    else:
        raise ValueError("no PNG, JPEG, BMP, GIF or WebP")
    return width * height, f"{height}x{width} (height x width)"


def _of_jpeg(content: bytes) -> tuple[int, int]:
    """Return the size in the frame's header, which is behind segments of known lengths."""
    place = 2
    while True:
        place = content.index(b"\xff", place)  # raises ValueError
        marker = content[place + 1]
        if marker == 0xFF:  # filling
            place += 1
        elif marker in (0x00, 0x01) or 0xD0 <= marker <= 0xD8:  # without a length
            place += 2
        elif 0xC0 <= marker <= 0xCF and marker not in _NOT_OF_SIZE:
            height, width = struct.unpack_from(">HH", content, place + 5)
            return width, height
        elif marker in (0xD9, 0xDA):
            raise ValueError("no frame before the image")
        else:
            place += 2 + struct.unpack_from(">H", content, place + 2)[0]


def _of_gif(content: bytes) -> tuple[int, str]:
    """Return the pixels of all pictures: the decoder unpacks them to reach the first."""
    width, height, flags = struct.unpack_from("<HHB", content, 6)
    place, pixels, pictures = 13 + _colours(flags), 0, 0
    while place < len(content) and content[place] != 0x3B:
        if content[place] == 0x2C:
            *size, flags = struct.unpack_from("<HHB", content, place + 5)
            pixels, pictures = pixels + size[0] * size[1], pictures + 1
            place += 10 + _colours(flags) + 1
        elif content[place] == 0x21:
            place += 2
        else:
            raise ValueError("no block")
        while place < len(content) and content[place]:  # parts of up to 255 bytes, then a 0
            place += 1 + content[place]
        place += 1
    shown = f"{height}x{width} (height x width)"
    if pictures > 1:
        shown += f" in {pictures} pictures"
    return max(pixels, width * height), shown


def _colours(flags: int) -> int:
    """Return the bytes of a table of colours."""
    return 3 << (1 + (flags & 7)) if flags & 0x80 else 0


def _of_webp(content: bytes) -> tuple[int, int]:
    kind = content[12:16]
    if kind == b"VP8X":
        return tuple(1 + int.from_bytes(content[at : at + 3], "little") for at in (24, 27))
    if kind == b"VP8L":
        bits = struct.unpack_from("<I", content, 21)[0]
        return 1 + (bits & 0x3FFF), 1 + (bits >> 14 & 0x3FFF)
    width, height = struct.unpack_from("<HH", content, 26)
    return width & 0x3FFF, height & 0x3FFF
