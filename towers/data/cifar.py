"""The two forms in which the files of CIFAR-10 and CIFAR-100 were published.

A binary file is a row of records without header: a byte for each label, then the picture as 3072
bytes, its red plane, its green plane, its blue plane. The other form is a pickled dict.
"""

from collections.abc import Mapping

import numpy as np

from towers.data import pickled
from towers.errors import InputError

PICTURE_BYTES = 32 * 32 * 3
MAX_PICKLE = 4  # times the bytes of its pictures


def read(
    path: str, content: bytes, title: str, num_records: int, labels: Mapping[str, int]
) -> tuple[np.ndarray, np.ndarray]:
    """Return the pictures and labels of a file.

    Args:
        path: of the file; it is binary if this ends in .bin.
        content: of the file.
        title: of the data set, for messages.
        num_records: N, which the file must have.
        labels: {key in a pickle: number of classes}, in the order of a binary file's bytes.

    Returns:
        Images, uint8 `[N, 32, 32, 3]`, and labels, int32 `[N, len(labels)]`.

    Raises:
        InputError: the file is damaged; it is named.
    """
    if path.endswith(".bin"):
        planes, found = _binary(path, content, num_records, len(labels))
    else:
        planes, found = _pickle(path, content, title, num_records, list(labels))
    for column, (key, num_classes) in zip(found.T, labels.items(), strict=True):
        wrong = np.flatnonzero((column < 0) | (column >= num_classes))
        if wrong.size:
            raise InputError(
                f"{path}: record {wrong[0]} (counted from 0) has "
                f"{key.removesuffix('s').replace('_', ' ')} {column[wrong[0]]}; "
                f"allowed are 0..{num_classes - 1}"
            )
    images = np.ascontiguousarray(planes.reshape(-1, 3, 32, 32).transpose(0, 2, 3, 1))
    return images, found.astype(np.int32)


def _binary(
    path: str, content: bytes, num_records: int, num_labels: int
) -> tuple[np.ndarray, np.ndarray]:
    """Return the planes, uint8 `[N, 3072]`, and the labels of a file of records."""
    size = num_labels + PICTURE_BYTES
    if len(content) != num_records * size:
        raise InputError(
            f"{path} has {len(content):,} bytes; expected {num_records:,} records of {size} bytes"
        )
    records = np.frombuffer(content, np.uint8).reshape(-1, size)
    return records[:, num_labels:], records[:, :num_labels]


def _pickle(
    path: str, content: bytes, title: str, num_records: int, keys: list[str]
) -> tuple[np.ndarray, np.ndarray]:
    """Return the planes, uint8 `[N, 3072]`, and the labels of a pickled dict."""
    expected = f"data, uint8 [{num_records}, {PICTURE_BYTES}], and as many {' and '.join(keys)}"
    try:
        batch = pickled.loads(content)
        data, labels = batch[b"data"], [batch[key.encode()] for key in keys]
        if (data.dtype, data.shape) != ("uint8", (num_records, PICTURE_BYTES)) or not all(
            isinstance(column, list)
            and len(column) == num_records
            and all(type(label) is int for label in column)
            for column in labels
        ):
            raise ValueError(f"expected a dict with {expected}")
        return data, np.array(labels).T
    except Exception as error:  # a damaged pickle can raise anything
        reason = " ".join(str(error).split())[:200] or type(error).__name__
        raise InputError(f"{path} is no pickle of {title}: {reason}") from None
