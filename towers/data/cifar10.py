"""CIFAR-10: find it under a folder, in either of its official forms, or download it.

Images: 50,000 for training and 10,000 for testing, uint8 `[32, 32, 3]`, ten classes.
Source: Krizhevsky, Learning Multiple Layers of Features from Tiny Images, 2009.

A binary file is a row of records without header: one label byte, then the picture as 3072 bytes,
its red plane, its green plane, its blue plane. A lost byte is seen by the file's size, a changed
one by the sum that each published file is known to have.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import sys
import tempfile
from collections.abc import Iterator
from typing import TYPE_CHECKING

import numpy as np

from towers.data import pickled
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
_MAX_PICKLE = 4  # times the bytes of its pictures
# Of the files as they are published.
_MD5_OF = {
    "data_batch_1.bin": "5dd7e06a14cb22eb9f671a540d1b7c25",
    "data_batch_2.bin": "5ea93a67294ea407fff1d09f752e9692",
    "data_batch_3.bin": "942cd6a4bcdd0dd3c604fbe906cb4421",
    "data_batch_4.bin": "ae636b3ba5c66a11e91e8cb52e771fcb",
    "data_batch_5.bin": "53f37980c15c3d472c316c40844f3f0d",
    "test_batch.bin": "803d5f7f4d78ea53de84dbe85f74fb6d",
    "data_batch_1": "c99cafc152244af753f735de768cd75f",
    "data_batch_2": "d4bba439e000b95fd0a9bffe97cbabec",
    "data_batch_3": "54ebc095f3ab1f0389bbae665268c751",
    "data_batch_4": "634d18415352ddfa80567beed471001a",
    "data_batch_5": "482c414d41f54cd18b22e5b47cb7c3cb",
    "test_batch": "40351d587109b95175f43aff81a1287e",
}


def load(data_dir: str) -> Data:
    """Read CIFAR-10 from wherever it lies under `data_dir`; download it if it is not there.

    Files that are not those that were published are named in a warning, and taken.

    Returns:
        The data set, in memory (180 MB).

    Raises:
        InputError: a file is damaged or missing from its set, or the download failed.
    """
    from towers.data.pipeline import ArraySplit, Data  # `find` needs no TensorFlow

    if not find(data_dir):
        _download(data_dir)
    paths = find(data_dir)
    try:
        images, labels, differing = zip(*map(_read, paths), strict=True)
    except InputError as error:
        raise InputError(f"{error}; put an intact copy in its place") from None
    if any(differing):
        print(
            f"warning: {', '.join(filter(None, differing))} in {os.path.dirname(paths[0])} "
            "differ from the published files of CIFAR-10, by their md5: accuracies may not compare",
            file=sys.stderr,
        )
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


def _read(path: str) -> tuple[np.ndarray, np.ndarray, str]:
    """Read a file.

    Returns:
        Images, uint8 `[N, 32, 32, 3]`, labels, int32 `[N]`, and the file's name if it is not the
        one that was published, else "".
    """
    name, num_bytes = os.path.basename(path), RECORDS_PER_FILE * _PICTURE_BYTES
    try:
        with open(path, "rb") as file:
            content = file.read(_MAX_PICKLE * num_bytes + 1)
    except OSError as error:
        raise InputError(f"cannot read {path}: {error.strerror}") from None
    planes, labels = (_binary if path.endswith(".bin") else _pickle)(path, content)
    wrong = np.flatnonzero((labels < 0) | (labels >= len(CLASS_NAMES)))
    if wrong.size:
        raise InputError(
            f"{path}: record {wrong[0]} (counted from 0) has label {labels[wrong[0]]}; "
            f"allowed are 0..{len(CLASS_NAMES) - 1}"
        )
    images = np.ascontiguousarray(planes.reshape(-1, 3, 32, 32).transpose(0, 2, 3, 1))
    md5 = hashlib.md5(content, usedforsecurity=False).hexdigest()
    return images, labels.astype(np.int32), "" if md5 == _MD5_OF[name] else name


def _binary(path: str, content: bytes) -> tuple[np.ndarray, np.ndarray]:
    """Return the planes, uint8 `[N, 3072]`, and the labels of a file of records."""
    size = 1 + _PICTURE_BYTES
    if len(content) != RECORDS_PER_FILE * size:
        raise InputError(
            f"{path} has {os.path.getsize(path):,} bytes; expected {RECORDS_PER_FILE:,} records of "
            f"{size} bytes"
        )
    records = np.frombuffer(content, np.uint8).reshape(-1, size)
    return records[:, 1:], records[:, 0]


def _pickle(path: str, content: bytes) -> tuple[np.ndarray, np.ndarray]:
    """Return the planes, uint8 `[N, 3072]`, and the labels of a pickled dict."""
    expected = f"data, uint8 [{RECORDS_PER_FILE}, {_PICTURE_BYTES}], and as many labels"
    most = _MAX_PICKLE * RECORDS_PER_FILE * _PICTURE_BYTES
    try:
        if len(content) > most:
            raise ValueError(f"it has more than {most:,} bytes")
        batch = pickled.loads(content)
        data, labels = batch[b"data"], batch[b"labels"]
        whole = isinstance(labels, list) and all(type(label) is int for label in labels)
        found = (data.dtype, data.shape, whole, len(labels))
        if found != ("uint8", (RECORDS_PER_FILE, _PICTURE_BYTES), True, RECORDS_PER_FILE):
            raise ValueError(f"expected a dict with {expected}")
        return data, np.array(labels)
    except Exception as error:  # a damaged pickle can raise anything
        reason = " ".join(str(error).split())[:200] or type(error).__name__
        raise InputError(f"{path} is no pickle of CIFAR-10: {reason}") from None
