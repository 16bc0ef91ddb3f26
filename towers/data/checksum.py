"""Checksums that tell whether two runs were given the same data.

Each split makes its own, by `Split.checksum`: of all bytes where they are in memory, of what the
files are called and how long they are where they are not.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Sequence
from typing import Any

import numpy as np

_SIZED_FILES = 20_000  # of more, so many are looked at: a file system may take a millisecond each


def digest(*arrays: object) -> str:
    """Return the sha256 of the types, shapes and values of arrays or tensors, in 64 digits."""
    found = hashlib.sha256()
    for array in map(_host_array, arrays):
        found.update(f"{array.dtype.name}{list(array.shape)};".encode())
        found.update(np.ascontiguousarray(array).reshape(-1).view(np.uint8))
    return found.hexdigest()


def of_arrays(images: object, labels: object) -> dict[str, Any]:
    """Return the checksum of images `[N, H, W, C]` and labels `[N]` that are held in memory."""
    images, labels = _host_array(images), _host_array(labels)
    return {
        "kind": "arrays",
        "sha256": digest(images, labels),
        "shape": list(images.shape),
        "dtype": images.dtype.name,
        "labels_dtype": labels.dtype.name,
    }


def of_files(folder: str, names: Sequence[str], labels: object) -> dict[str, Any]:
    """Return a checksum of files that are too many to read: of names, sizes and labels.

    Args:
        folder: where they lie; not part of the checksum, so that they may be moved.
        names: of all files, relative to the folder.
        labels: of all examples, `[N]`.
    """
    found = hashlib.sha256("\0".join(names).encode(errors="surrogateescape"))
    places = np.linspace(0, len(names) - 1, min(len(names), _SIZED_FILES)).astype(int).tolist()
    for place in places:
        try:
            size = os.path.getsize(os.path.join(folder, names[place]))
        except OSError:  # it has gone: a run that needs it says so
            size = -1
        found.update(b"%d;" % size)
    found.update(digest(labels).encode())
    return {
        "kind": "names, sizes and labels",
        "sha256": found.hexdigest(),
        "examples": len(labels),
        "files": len(names),
        "files_whose_size_counts": len(places),
    }


def of_pipeline(size: int) -> dict[str, Any]:
    """Return what stands for a checksum where the examples come from code of the user's."""
    reason = "a tf.data pipeline of your own is not read through; see first_batch"
    return {"kind": "pipeline", "sha256": None, "reason": reason, "examples": size}


def _host_array(array: object) -> np.ndarray:
    """Return an array or a tensor as an array, without a copy where that can be had."""
    try:
        return np.asarray(memoryview(array))
    except (TypeError, ValueError, BufferError):  # on a GPU, or bfloat16, which has no buffer
        return np.asarray(array.numpy() if hasattr(array, "numpy") else array)
