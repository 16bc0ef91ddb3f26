"""MATLAB 5 files, as MATLAB and scipy write them, and a small SVHN of them."""

import struct
import zlib

import numpy as np

TYPES = {"i1": 1, "u1": 2, "i2": 3, "u2": 4, "i4": 5, "u4": 6, "f4": 7, "f8": 9, "i8": 12, "u8": 13}
CLASSES = {"f8": 6, "f4": 7, "i1": 8, "u1": 9, "i2": 10, "u2": 11, "i4": 12, "u4": 13, "u8": 15}
NUM = {"train": 24, "extra": 16, "test": 12}


def element(kind, content, order="<"):
    if 0 < len(content) <= 4:
        return struct.pack(f"{order}I", len(content) << 16 | kind) + content.ljust(4, b"\0")
    return struct.pack(f"{order}II", kind, len(content)) + content + bytes(-len(content) % 8)


def matrix(name, array, order="<", flags=None, stored="", shape=None):
    """Return the element of an array; `stored` is the type of its numbers, if another one."""
    code = array.dtype.str[1:]
    parts = [
        (6, struct.pack(f"{order}II", CLASSES[code] if flags is None else flags, 0)),
        (5, struct.pack(f"{order}{array.ndim}i", *(shape or array.shape))),
        (1, name.encode()),
        (TYPES[stored or code], array.astype(order + (stored or code)).tobytes(order="F")),
    ]
    return element(14, b"".join(element(*part, order) for part in parts), order)


def compressed(content, order="<"):
    content = zlib.compress(content)
    return struct.pack(f"{order}II", 15, len(content)) + content


def header(order="<"):
    return b"MATLAB 5.0 MAT-file".ljust(124) + (b"\0\1IM" if order == "<" else b"\1\0MI")


def mat(arrays, order="<", compress=True):
    """Return a file of {name: array}."""
    elements = [matrix(name, array, order) for name, array in arrays.items()]
    if compress:
        elements = [compressed(one, order) for one in elements]
    return header(order) + b"".join(elements)


def digits(part):
    """Return images and labels 0..9 of a part of SVHN."""
    rng = np.random.default_rng(NUM[part])
    images = rng.integers(0, 256, (NUM[part], 32, 32, 3), np.uint8)
    return images, np.arange(NUM[part], dtype=np.int32) % 10


def arrays_of(part):
    """Return X and y as the files have them."""
    images, labels = digits(part)
    return {
        "X": images.transpose(1, 2, 3, 0),
        "y": np.where(labels == 0, 10, labels).astype(np.uint8)[:, None],
    }


def write_svhn(folder, parts=tuple(NUM), **how):
    folder.mkdir(parents=True, exist_ok=True)
    for part in parts:
        (folder / f"{part}_32x32.mat").write_bytes(mat(arrays_of(part), **how))
