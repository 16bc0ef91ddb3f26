"""Read and write CIFAR-10's binary format.

A file is a row of records without header: one label byte, then the 32x32 picture as 3072 bytes,
its red plane, its green plane, its blue plane. Towers keeps the `shapes` data set in it too. A
picture that is shifted by a lost byte never gets through, for then the file's size is wrong.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np

from towers import files
from towers.errors import InputError

IMAGE_SHAPE = (32, 32, 3)
RECORD_BYTES = 1 + 32 * 32 * 3
NUM_CLASSES = 10


def read(path: str, num_records: int) -> tuple[np.ndarray, np.ndarray]:
    """Read a file of N = `num_records` records.

    Returns:
        Images, uint8 `[N, 32, 32, 3]`, and labels, int32 `[N]`, each 0..9.

    Raises:
        InputError: the file is missing, unreadable or of another length, or has a label above 9.
    """
    expected = f"expected {num_records:,} records of {RECORD_BYTES} bytes"
    try:
        content = Path(path).read_bytes()
    except OSError as error:
        raise InputError(f"cannot read {path}: {error.strerror}; {expected}") from None
    if len(content) != num_records * RECORD_BYTES:
        raise InputError(f"{path} has {len(content):,} bytes; {expected}")
    records = np.frombuffer(content, np.uint8).reshape(-1, RECORD_BYTES)
    return images_of(records[:, 1:]), checked_labels(path, records[:, 0])


def write(path: str, images: np.ndarray, labels: np.ndarray) -> None:
    """Write images, uint8 `[N, 32, 32, 3]`, and labels 0..9, `[N]`: whole, or not at all.

    Raises:
        OSError: the folder cannot be written, or the disk is full.
    """
    records = np.empty((len(images), RECORD_BYTES), np.uint8)
    records[:, 0] = labels
    records[:, 1:] = images.transpose(0, 3, 1, 2).reshape(len(images), -1)
    with files.replacing(Path(path)) as temporary:
        temporary.write_bytes(records)


def images_of(planes: np.ndarray) -> np.ndarray:
    """Return uint8 `[N, 3072]`, a picture's planes one after the other, as `[N, 32, 32, 3]`."""
    return np.ascontiguousarray(planes.reshape(-1, 3, 32, 32).transpose(0, 2, 3, 1))


def checked_labels(path: str, labels: np.ndarray) -> np.ndarray:
    """Return labels as int32; raise an InputError that names the first record without 0..9."""
    wrong = np.flatnonzero((labels < 0) | (labels >= NUM_CLASSES))
    if wrong.size:
        raise InputError(
            f"{path}: record {wrong[0]} (counted from 0) has label {labels[wrong[0]]}; "
            f"allowed are 0..{NUM_CLASSES - 1}"
        )
    return labels.astype(np.int32)
