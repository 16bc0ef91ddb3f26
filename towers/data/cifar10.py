"""CIFAR-10: find it under a folder, in either of its official forms, or download it.

Images: 50,000 for training and 10,000 for testing, uint8 `[32, 32, 3]`, ten classes.
Source: Krizhevsky, Learning Multiple Layers of Features from Tiny Images, 2009.
"""

from __future__ import annotations

import collections
import os
from collections.abc import Iterator
from typing import TYPE_CHECKING

import numpy as np

from towers.data import download, pickles, records
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
        try:
            download.fetch(URL, MD5, os.path.join(data_dir, FOLDER))
        except InputError as error:
            raise InputError(
                f"{error}; put {FOLDER} (data_batch_1.bin ... test_batch.bin) under {data_dir}, "
                "or use --dataset=shapes"
            ) from None
    paths = find(data_dir)
    read = records.read if paths[0].endswith(".bin") else pickles.read
    try:
        parts = [read(path, RECORDS_PER_FILE) for path in paths]
    except InputError as error:
        raise InputError(f"{error}; put an intact copy in its place") from None
    images, labels = zip(*parts, strict=True)
    train = ArraySplit(np.concatenate(images[:5]), np.concatenate(labels[:5]))
    test = ArraySplit(images[5], labels[5])
    return Data("cifar10", train, test, len(CLASS_NAMES), records.IMAGE_SHAPE, CLASS_NAMES)


def find(data_dir: str) -> list[str]:
    """Look for the six files of CIFAR-10, the folders nearest to `data_dir` first.

    The binary files anywhere are preferred to pickles. Hidden folders are skipped.

    Returns:
        The paths of the five training files and the test file, or nothing.

    Raises:
        InputError: some of the six files are there, but no folder has them all.
    """
    pickled, incomplete = [], None
    for folder, files in _walk(data_dir):
        for names in (_BINARIES, _PICKLES):
            missing = [name for name in names if name not in files]
            if not missing and names is _BINARIES:
                return [os.path.join(folder, name) for name in names]
            if not missing:
                pickled = pickled or [os.path.join(folder, name) for name in names]
            elif len(missing) < len(names):
                incomplete = incomplete or (folder, missing)
    if incomplete and not pickled:
        folder, missing = incomplete
        raise InputError(
            f"CIFAR-10 in {folder} lacks {', '.join(missing)}; add what is missing, or move the "
            "rest away to have CIFAR-10 downloaded"
        )
    return pickled


def _walk(top: str) -> Iterator[tuple[str, set[str]]]:
    """Yield (folder, its files), shallowest first, in the order of their names."""
    waiting, seen = collections.deque([top]), set()
    while waiting:
        folder = waiting.popleft()
        real = os.path.realpath(folder)
        if real in seen:  # a link back up
            continue
        seen.add(real)
        try:
            entries = sorted(os.scandir(folder), key=lambda entry: entry.name)
        except OSError:
            if folder == top and os.path.isdir(top):
                raise InputError(f"--data_dir={top} cannot be read; check permissions") from None
            continue
        yield folder, {entry.name for entry in entries if not entry.is_dir()}
        waiting.extend(e.path for e in entries if e.is_dir() and not e.name.startswith("."))
