"""CIFAR-10: find it under a folder, in either of its official forms, or download it.

Images: 50,000 for training and 10,000 for testing, uint8 `[32, 32, 3]`, ten classes.
Source: Krizhevsky, Learning Multiple Layers of Features from Tiny Images, 2009.
"""

from __future__ import annotations

import collections
import os

import numpy as np

from towers.data import download, pickles, records
from towers.data.pipeline import ArraySplit, Data
from towers.errors import InputError

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

    Args:
        data_dir: a folder; created if there is something to put into it.

    Returns:
        The data set, in memory (180 MB).

    Raises:
        InputError: a file is damaged or missing from its set, or the download failed.
    """
    paths = find(data_dir)
    if not paths:
        folder = os.path.join(data_dir, FOLDER)
        try:
            size = RECORDS_PER_FILE * records.RECORD_BYTES
            download.fetch(URL, MD5, dict.fromkeys(_BINARIES, size), folder)
        except InputError as error:
            raise InputError(
                f"{error}; put {FOLDER} (data_batch_1.bin ... test_batch.bin) under {data_dir}, "
                "or use --dataset=shapes"
            ) from None
        paths = [os.path.join(folder, name) for name in _BINARIES]
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
    complete, incomplete = {}, None
    for folder, files in _walk(data_dir):
        for names in (_BINARIES, _PICKLES):
            missing = [name for name in names if name not in files]
            if not missing:
                complete.setdefault(names, folder)
            elif len(missing) < len(names) and not incomplete:
                incomplete = folder, missing
        if _BINARIES in complete:
            break
    for names in (_BINARIES, _PICKLES):
        if names in complete:
            return [os.path.join(complete[names], name) for name in names]
    if incomplete:
        folder, missing = incomplete
        raise InputError(
            f"CIFAR-10 in {folder} is incomplete: {', '.join(missing)} "
            f"{'is' if len(missing) == 1 else 'are'} missing; add "
            "what is missing, or move the rest away to have CIFAR-10 downloaded"
        )
    return []


def _walk(top: str):
    """Yield (folder, set of its files), shallowest first, in the order of their names."""
    queue, seen = collections.deque([top]), set()
    while queue:
        folder = queue.popleft()
        real = os.path.realpath(folder)
        if real in seen:  # a link back up
            continue
        seen.add(real)
        try:
            entries = sorted(os.scandir(folder), key=lambda entry: entry.name)
        except OSError:
            if folder == top and os.path.isdir(top):
                raise InputError(
                    f"--data_dir={top} cannot be read; check its permissions"
                ) from None
            continue
        yield folder, {entry.name for entry in entries if not entry.is_dir()}
        queue.extend(e.path for e in entries if e.is_dir() and not e.name.startswith("."))
