"""CIFAR-10: find it under a folder, in either of its official forms, or download it.

Images: 50,000 for training and 10,000 for testing, uint8 `[32, 32, 3]`, ten classes.
Source: Krizhevsky, Learning Multiple Layers of Features from Tiny Images, 2009.

A binary file is a row of records without header: one label byte, then the picture as 3072 bytes,
its red plane, its green plane, its blue plane. A lost byte is seen by the file's size. A pickle is
a program: its reader knows the three names that an array is made with, puts harmless functions of
its own in their place, and refuses any other name.
"""

from __future__ import annotations

import contextlib
import os
import pickle
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from towers.errors import InputError

if TYPE_CHECKING:
    from towers.data.pipeline import Data

CLASS_NAMES = (
    "airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck",
)  # fmt: skip
URL = "https://www.cs.toronto.edu/~kriz/cifar-10-binary.tar.gz"
MD5 = "c32a1d4ab5d03f1284b67883e8d87530"
FOLDER = "cifar-10-batches-bin"
RECORDS_PER_FILE = 10_000

_PICTURE_BYTES = 32 * 32 * 3
_PICKLES = (*(f"data_batch_{i}" for i in range(1, 6)), "test_batch")
_BINARIES = tuple(f"{name}.bin" for name in _PICKLES)


def load(data_dir: str) -> Data:
    """Read CIFAR-10 from wherever it lies under `data_dir`; download it if it is not there.

    Returns:
        The data set, in memory (180 MB).

    Raises:
        InputError: a file is damaged or missing from its set, or the download failed.
    """
    from towers.data.pipeline import ArraySplit, Data  # `find` needs no TensorFlow

    if not find(data_dir):
        _download(data_dir)
    try:
        images, labels = zip(*map(_read, find(data_dir)), strict=True)
    except InputError as error:
        raise InputError(f"{error}; put an intact copy in its place") from None
    train = ArraySplit(np.concatenate(images[:5]), np.concatenate(labels[:5]))
    test = ArraySplit(images[5], labels[5])
    return Data("cifar10", train, test, len(CLASS_NAMES), CLASS_NAMES)


def find(data_dir: str) -> list[str]:
    """Look for the six files of CIFAR-10, the folders nearest to `data_dir` first.

    Returns:
        The paths of the five training files and the test file, or nothing.

    Raises:
        InputError: some of the six files are there, but no folder has them all.
    """
    incomplete = ""
    for folder, files in _folders(data_dir):
        for names in (_BINARIES, _PICKLES):
            missing = [name for name in names if name not in files]
            if not missing:
                return [os.path.join(folder, name) for name in names]
            if len(missing) < len(names):
                incomplete = incomplete or f"{folder} lacks {', '.join(missing)}"
    if incomplete:
        raise InputError(
            f"CIFAR-10 in {incomplete}; add what is missing, or move the rest away to have "
            "CIFAR-10 downloaded"
        )
    return []


def _folders(top: str) -> Iterator[tuple[str, list[str]]]:
    """Yield (folder, what is in it), shallowest first, without hidden folders."""
    waiting, seen = [top], set()
    for folder in waiting:  # which grows meanwhile
        real = os.path.realpath(folder)
        if real in seen:  # a link back up
            continue
        seen.add(real)
        with contextlib.suppress(OSError):
            entries = sorted(os.scandir(folder), key=lambda entry: entry.name)
            yield folder, [entry.name for entry in entries]
            waiting += [e.path for e in entries if e.is_dir() and not e.name.startswith(".")]


def _download(data_dir: str) -> None:
    """Fetch the binary files; their folder appears in one move, when it is complete."""
    import keras

    folder = os.path.join(data_dir, FOLDER)
    try:
        os.makedirs(data_dir, exist_ok=True)
        with (
            tempfile.TemporaryDirectory(dir=data_dir, prefix=".towers-") as temporary,
            contextlib.redirect_stdout(sys.stderr),  # where the JSON of --json is not
        ):
            unpacked = keras.utils.get_file(
                "archive",
                URL,
                cache_dir=temporary,
                cache_subdir="",
                file_hash=MD5,
                hash_algorithm="md5",
                extract=True,
            )
            if not os.path.isdir(folder):  # another process may have brought it meanwhile
                os.replace(os.path.join(unpacked, FOLDER), folder)
    except Exception as error:  # Keras raises many kinds, the plain Exception among them
        reason = " ".join(str(error).split()) or type(error).__name__
        raise InputError(
            f"cannot download {URL} to {folder}: {reason}; put {FOLDER} (data_batch_1.bin ... "
            f"test_batch.bin) under {data_dir}, or use --dataset=shapes"
        ) from None


def _read(path: str) -> tuple[np.ndarray, np.ndarray]:
    """Read images, uint8 `[N, 32, 32, 3]`, and labels, int32 `[N]`, of one file."""
    planes, labels = (_read_binary if path.endswith(".bin") else _read_pickle)(path)
    wrong = np.flatnonzero((labels < 0) | (labels >= len(CLASS_NAMES)))
    if wrong.size:
        raise InputError(
            f"{path}: record {wrong[0]} (counted from 0) has label {labels[wrong[0]]}; "
            f"allowed are 0..{len(CLASS_NAMES) - 1}"
        )
    images = planes.reshape(-1, 3, 32, 32).transpose(0, 2, 3, 1)
    return np.ascontiguousarray(images), labels.astype(np.int32)


def _read_binary(path: str) -> tuple[np.ndarray, np.ndarray]:
    """Return the planes, uint8 `[N, 3072]`, and the labels of a file of records."""
    try:
        content = Path(path).read_bytes()
    except OSError as error:
        raise InputError(f"cannot read {path}: {error.strerror}") from None
    size = 1 + _PICTURE_BYTES
    if len(content) != RECORDS_PER_FILE * size:
        raise InputError(
            f"{path} has {len(content):,} bytes; expected {RECORDS_PER_FILE:,} records of {size} "
            "bytes"
        )
    records = np.frombuffer(content, np.uint8).reshape(-1, size)
    return records[:, 1:], records[:, 0]


def _read_pickle(path: str) -> tuple[np.ndarray, np.ndarray]:
    """Return the planes, uint8 `[N, 3072]`, and the labels of a pickled dict."""
    expected = f"data, uint8 [{RECORDS_PER_FILE}, {_PICTURE_BYTES}], and as many labels"
    try:
        with open(path, "rb") as file:
            batch = _Unpickler(file, encoding="bytes").load()
        data, labels = batch[b"data"], np.asarray(batch[b"labels"])
        found = (data.dtype, data.shape, labels.dtype.kind, labels.shape)
        if found != ("uint8", (RECORDS_PER_FILE, _PICTURE_BYTES), "i", (RECORDS_PER_FILE,)):
            raise ValueError(f"expected a dict with {expected}")
    except Exception as error:  # a damaged pickle can raise anything
        reason = " ".join(str(error).split()) or type(error).__name__
        raise InputError(f"{path} is no pickle of CIFAR-10: {reason}") from None
    return data, labels


def _dtype(name: bytes | str, *_: object) -> np.dtype:
    # numpy's own unchangeable object: a state in the file cannot alter it; and no array of objects,
    # which is made of pointers, can be built.
    if name not in (b"u1", "u1"):
        raise ValueError(f"the dtype {name!r} is not allowed in it")
    return np.dtype(np.uint8)


# What stands for each name. Arrays get their shape, dtype and bytes in a later step (numpy's
# __setstate__, which checks that they agree).
_STAND_INS = {
    "numpy.dtype": _dtype,
    "numpy.ndarray": None,
    "numpy.core.multiarray._reconstruct": lambda *_: np.empty(0, np.uint8),
    "numpy._core.multiarray._reconstruct": lambda *_: np.empty(0, np.uint8),
}


class _Unpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> object:
        if f"{module}.{name}" not in _STAND_INS:
            raise ValueError(f"{module}.{name} is not allowed in it")
        return _STAND_INS[f"{module}.{name}"]
