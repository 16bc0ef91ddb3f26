"""Arrays of numbers in a MATLAB 5 file, which is what MATLAB's `save -v7` writes.

After a header of 128 bytes come elements: a type, a size, and as many bytes. One is an array, or
an array as zlib compressed it. An array is made of elements again: its class, its dimensions, its
name and its numbers. Whatever else such a file may hold (texts, structures, objects, functions) is
refused, and nothing takes memory that the bytes of the file, or the limit, do not account for.

Source: MathWorks, MAT-File Format.
"""

import math
import struct
import zlib
from collections.abc import Container

import numpy as np

_HEADER_BYTES = 128
_BYTE_ORDERS = {b"\x00\x01IM": "<", b"\x01\x00MI": ">"}  # by version and mark of order
_INT8, _INT32, _UINT32, _MATRIX, _COMPRESSED = 1, 5, 6, 14, 15
_DTYPES = {
    1: "i1", 2: "u1", 3: "i2", 4: "u2", 5: "i4", 6: "u4", 7: "f4", 9: "f8", 12: "i8", 13: "u8",
}  # fmt: skip
_NUMBERS = range(6, 16)  # the classes of arrays of double, single, int8 ... uint64
_COMPLEX = 0x800
_MAX_DIMENSIONS = 8
_INPUT_CHUNK, _OUTPUT_CHUNK = 2**16, 2**20


def loads(content: bytes, names: Container[str], max_bytes: int) -> dict[str, np.ndarray]:
    """Return the arrays of a file.

    Args:
        content: of the file.
        names: of the arrays that it may have.
        max_bytes: that each array may have.

    Returns:
        {name: array}. The first axis is the one whose numbers are neighbours in memory.

    Raises:
        ValueError: it is damaged, or holds something else; zlib.error, too.
    """
    if content[124:128] == b"\x00\x02IM":
        raise ValueError("it is of version 7.3; in MATLAB, save -v7 writes what can be read")
    order = _BYTE_ORDERS.get(content[124:_HEADER_BYTES])
    if not order:
        raise ValueError("it does not begin as a MATLAB 5 file")
    found: dict[str, np.ndarray] = {}
    rest = memoryview(content)[_HEADER_BYTES:]
    while rest:
        kind, element, rest = _next(rest, order)
        if kind == _COMPRESSED:
            kind, element, _ = _next(_inflated(element, max_bytes + 1024), order)
        if kind != _MATRIX:
            raise ValueError(f"it has an element of type {kind}, which is no array")
        name, array = _array(element, order)
        if name not in names or name in found:
            raise ValueError(f"it has an array {name[:40]!r} that is not expected")
        found[name] = array
    return found


def _next(data: memoryview, order: str) -> tuple[int, memoryview, memoryview]:
    """Return type and bytes of the first element, and what is behind it."""
    if len(data) < 8:
        raise ValueError("it ends too early")
    kind, size = struct.unpack_from(f"{order}II", data)
    if kind >> 16:  # up to four bytes stand in the tag itself
        kind, size, start, end = kind & 0xFFFF, kind >> 16, 4, 8
        if size > 4:
            raise ValueError(f"it has {size} bytes where there is room for 4")
    else:
        start = 8
        end = start + size + (0 if kind == _COMPRESSED else -size % 8)
    if start + size > len(data):
        raise ValueError("it ends too early")
    return kind, data[start : start + size], data[end:]


def _inflated(compressed: memoryview, most: int) -> memoryview:
    """Return the bytes that were compressed, of which there may be `most`."""
    stream, result = zlib.decompressobj(), bytearray()
    for start in range(0, len(compressed), _INPUT_CHUNK):
        waiting = compressed[start : start + _INPUT_CHUNK]
        while waiting:
            result += stream.decompress(waiting, _OUTPUT_CHUNK)
            waiting = stream.unconsumed_tail
            if len(result) > most:
                raise ValueError(f"an array in it has more than {most:,} bytes")
        if stream.eof:
            break
    result += stream.flush()
    if not stream.eof:
        raise ValueError("it ends too early")
    return memoryview(result)


def _array(element: memoryview, order: str) -> tuple[str, np.ndarray]:
    """Return the name and the numbers of an array."""
    parts = []
    while element:
        kind, part, element = _next(element, order)
        parts.append((kind, part))
        if len(parts) == 4:
            break
    if [kind for kind, _ in parts[:3]] != [_UINT32, _INT32, _INT8] or len(parts[0][1]) != 8:
        raise ValueError("it has an array without class, dimensions and name")
    flags, _ = struct.unpack(f"{order}II", parts[0][1])
    name = bytes(parts[2][1]).decode("latin-1")
    if flags & 0xFF not in _NUMBERS or flags & _COMPLEX or len(parts) < 4:
        raise ValueError(f"{name[:40]!r} in it is no array of real numbers")
    kind, numbers = parts[3]
    shape = np.frombuffer(parts[1][1], f"{order}i4").tolist()
    if kind not in _DTYPES or min(shape, default=-1) < 0 or len(shape) > _MAX_DIMENSIONS:
        raise ValueError(f"{name[:40]!r} in it has type {kind} and dimensions {shape[:9]}")
    dtype = np.dtype(order + _DTYPES[kind])
    if math.prod(shape) * dtype.itemsize != len(numbers):
        raise ValueError(f"{name[:40]!r} in it has {len(numbers):,} bytes for dimensions {shape}")
    return name, np.frombuffer(numbers, dtype).reshape(shape, order="F")
