"""Read and write CIFAR-10's binary format.

A file is a row of records without header: one label byte, then the 32x32 picture as 3072 bytes,
its red plane, its green plane, its blue plane. Towers keeps the `shapes` data set in it too.
What is damaged is refused with the file, the record and what was expected; a picture that is
shifted by a lost byte never gets through, for then the file's size is wrong.

    images, labels = records.read("data_batch_1.bin", num_records=10_000)
    records.write("copy.bin", images, labels)
"""

from __future__ import annotations

from pathlib import Path

import numpy as np

from towers import files
from towers.errors import InputError

IMAGE_SHAPE = (32, 32, 3)
RECORD_BYTES = 1 + 32 * 32 * 3
NUM_CLASSES = 10


def read(path: str, num_records: int | None = None) -> tuple[np.ndarray, np.ndarray]:
    """Read a file of records.

    Args:
        path: the file.
        num_records: how many records it must hold; None allows any number but 0.

    Returns:
        Images, uint8 `[N, 32, 32, 3]`, and labels, int32 `[N]`, each 0..9.

    Raises:
        InputError: the file is missing, unreadable, empty, cut off, of another length than
            `num_records`, or has a label above 9. The message names the file and the record.
    """
    try:
        with open(path, "rb") as file:
            content = file.read()
    except OSError as error:
        raise InputError(
            f"cannot read {path}: {error.strerror}; expected a file of records of "
            f"{RECORD_BYTES} bytes (CIFAR-10's binary format)"
        ) from None
    _check_size(path, len(content), num_records)
    records = np.frombuffer(content, np.uint8).reshape(-1, RECORD_BYTES)
    labels = records[:, 0]
    check_labels(path, labels)
    planes = records[:, 1:].reshape(-1, 3, 32, 32)
    return np.ascontiguousarray(planes.transpose(0, 2, 3, 1)), labels.astype(np.int32)


def write(path: str, images: np.ndarray, labels: np.ndarray) -> None:
    """Write a file of records: whole, or not at all.

    Args:
        path: the file; one that exists is replaced. Its folder must exist.
        images: uint8 `[N, 32, 32, 3]`.
        labels: integers `[N]`, each 0..9.

    Raises:
        ValueError: images or labels are not of that kind.
        OSError: the folder cannot be written, or the disk is full.
    """
    if images.dtype != np.uint8 or images.shape[1:] != IMAGE_SHAPE:
        raise ValueError(
            f"{path}: images are {images.dtype} {list(images.shape)}; records hold "
            "uint8 [N, 32, 32, 3]"
        )
    if labels.shape != images.shape[:1]:
        raise ValueError(f"{path}: {len(images)} images but labels of shape {list(labels.shape)}")
    check_labels(path, labels)
    records = np.empty((len(images), RECORD_BYTES), np.uint8)
    records[:, 0] = labels
    records[:, 1:] = images.transpose(0, 3, 1, 2).reshape(len(images), -1)
    with files.replacing(Path(path)) as temporary:  # which another process may read or write, too
        records.tofile(temporary)


def check_labels(path: str, labels: np.ndarray) -> None:
    """Raise an InputError that names the first record whose label is not 0..9."""
    wrong = np.flatnonzero((labels < 0) | (labels >= NUM_CLASSES))
    if wrong.size:
        raise InputError(
            f"{path}: record {wrong[0]} (counted from 0) has label {labels[wrong[0]]}; "
            f"allowed are 0..{NUM_CLASSES - 1}"
        )


def _check_size(path: str, num_bytes: int, num_records: int | None) -> None:
    expected = "records" if num_records is None else f"{num_records:,} records"
    if num_bytes == 0:
        raise InputError(f"{path} is empty; expected {expected} of {RECORD_BYTES} bytes")
    whole, rest = divmod(num_bytes, RECORD_BYTES)
    if rest:
        raise InputError(
            f"{path}: record {whole} (counted from 0) is cut off after {rest} of {RECORD_BYTES} "
            f"bytes; expected {expected} of {RECORD_BYTES} bytes"
        )
    if num_records is not None and whole != num_records:
        raise InputError(
            f"{path} holds {whole:,} records; expected {num_records:,} records of "
            f"{RECORD_BYTES} bytes"
        )
