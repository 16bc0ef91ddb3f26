"""Reads CIFAR-10: binary files in a folder, or those of `keras.datasets`.

50,000 images for training and 10,000 for testing, uint8 `[32, 32, 3]`; 180 MB. A record of a binary
file is a byte for the label, then 3072 bytes of the red, green and blue planes. `keras.datasets`
downloads another form of the files to Keras' cache, and checks its hash.

Source: Krizhevsky, Learning Multiple Layers of Features from Tiny Images, 2009.
"""

from __future__ import annotations

import contextlib
import os
import shlex
import sys
from typing import TYPE_CHECKING

import numpy as np

from towers.errors import InputError, reason

if TYPE_CHECKING:
    from towers.data.pipeline import Data

CLASS_NAMES = tuple("airplane automobile bird cat deer dog frog horse ship truck".split())
FILES = (*(f"data_batch_{i}.bin" for i in range(1, 6)), "test_batch.bin")
FOLDER, ARCHIVE = "cifar-10-batches-bin", "cifar-10-binary.tar.gz"  # of the authors
_PYTHON = "cifar-10-python.tar.gz", "cifar-10-batches-py", "data_batch_1"  # the other form
NUM_RECORDS = 10_000  # of each file
_RECORD_BYTES = 1 + 32 * 32 * 3

Half = tuple[np.ndarray, np.ndarray]  # images, uint8 [N, 32, 32, 3], and labels, int32 [N]


def load(data_dir: str) -> Data:
    """Read the data set from `data_dir` or a folder in it; "": from `keras.datasets`.

    Raises:
        InputError: a file is missing or damaged, or the download failed.
    """
    from towers.data.pipeline import ArraySplit, Data  # `find` needs no TensorFlow

    if data_dir:
        parts = list(map(_read, find(data_dir)))
        train = tuple(map(np.concatenate, zip(*parts[:-1], strict=True)))
        halves = train, parts[-1]
    else:
        halves = _from_keras()
    train, test = (ArraySplit(*half) for half in halves)
    return Data("cifar10", train, test, len(CLASS_NAMES), CLASS_NAMES)


def find(data_dir: str) -> list[str]:
    """Return the paths of the training files and the test file.

    Raises:
        InputError: some of them are missing.
    """
    folder = os.path.join(data_dir, FOLDER)
    folder = folder if os.path.isdir(folder) else data_dir
    paths = [os.path.join(folder, name) for name in FILES]
    if missing := [os.path.basename(path) for path in paths if not os.path.isfile(path)]:
        remedy = "name the folder of the binary files"
        archive = os.path.join(data_dir, ARCHIVE)
        if os.path.isfile(archive):
            remedy = f"type {shlex.join(['tar', '-xzf', archive, '-C', data_dir])}"
        elif any(os.path.exists(os.path.join(folder, name)) for name in _PYTHON):
            remedy = f"the files there are the Python version, which is not read: get {ARCHIVE}"
        raise InputError(
            f"--data_dir={data_dir}: {folder} has no {', '.join(missing)}; {remedy}, or leave "
            "--data_dir out to have Keras download cifar10"
        )
    return paths


def _read(path: str) -> Half:
    try:
        records = np.fromfile(path, np.uint8)
    except OSError as error:
        raise InputError(f"{path} cannot be read: {reason(error)}") from None
    labels = records[::_RECORD_BYTES].astype(np.int32)
    if len(records) != NUM_RECORDS * _RECORD_BYTES or labels.max() >= len(CLASS_NAMES):
        raise InputError(
            f"{path} is damaged; expected {NUM_RECORDS:,} records of {_RECORD_BYTES} bytes, with "
            f"labels 0..{len(CLASS_NAMES) - 1}; replace it with an intact copy"
        )
    planes = records.reshape(NUM_RECORDS, _RECORD_BYTES)[:, 1:].reshape(-1, 3, 32, 32)
    return np.ascontiguousarray(planes.transpose(0, 2, 3, 1)), labels


def _from_keras() -> list[Half]:
    import keras

    try:
        with contextlib.redirect_stdout(sys.stderr):  # where the JSON of --json is not
            halves = keras.datasets.cifar10.load_data()
    except Exception as error:  # Keras raises many kinds, the plain Exception among them
        raise InputError(
            f"keras.datasets cannot load cifar10: {reason(error)}; name the folder of its binary "
            f"files, --data_dir=DIR with DIR/{FOLDER}, or use --dataset=shapes"
        ) from None
    return [(images, labels[:, 0].astype(np.int32)) for images, labels in halves]
