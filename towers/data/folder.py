"""Image files in folders: `--dataset=folder --data_dir=DIR`.

    DIR/train/CLASS/*.png    also .jpg, .jpeg, .bmp, .gif, and in folders below
    DIR/test/CLASS/*.png     or DIR/validation or DIR/val

Labels are 0, 1, ... in the order of the class names. Nothing but the files' names is kept in memory
(some 100 bytes each); see `towers.data.encoded`.
"""

from __future__ import annotations

import os
from collections.abc import Sequence

import numpy as np
import tensorflow as tf

from towers.data import encoded
from towers.data.pipeline import Data
from towers.errors import InputError

_ENDINGS = (".png", ".jpg", ".jpeg", ".bmp", ".gif")
_TEST_NAMES = ("test", "validation", "val")
LAYOUT = "DIR/train/CLASS/*.png (or .jpg, .jpeg, .bmp, .gif) and DIR/test/CLASS/*.png"


def load(folder: str, size: encoded.Size | None = None) -> Data:
    """Find the images; decode a few of them.

    Args:
        folder: DIR.
        size: (height, width) to which images are resized; None: they are all of one size.

    Returns:
        The data set, images uint8 `[H, W, 3]`.

    Raises:
        InputError: a folder is missing, empty or cannot be read, test has a class that train has
            not, sizes differ and `size` is None, or one of the images that are tried is damaged.
    """
    train_dir = os.path.join(folder, "train")
    test_dir = _test_dir(folder)
    class_names = _class_names(train_dir)
    train, train_labels = _find(train_dir, class_names, class_names)
    of_test = _class_names(test_dir)
    for name in of_test:
        if name not in class_names:
            raise InputError(
                f"{os.path.join(test_dir, name)} is a class that {train_dir} has not; it has "
                f"{_some(class_names)}"
            )
    test, test_labels = _find(test_dir, of_test, class_names)
    shape = encoded.common_shape([train, test], size)
    return Data(
        name="folder",
        train=encoded.EncodedSplit(train, train_labels, shape, resize=size is not None),
        test=encoded.EncodedSplit(test, test_labels, shape, resize=size is not None),
        num_classes=len(class_names),
        image_shape=shape,
        class_names=tuple(class_names),
    )


class _Files:
    """Files of one image each."""

    def __init__(self, folder: str, names: list[str]):
        self._folder = folder
        self._names = np.array([os.fsencode(name) for name in names])  # compact: no object each
        self.size = len(names)

    def read(self, row: int) -> bytes:
        with open(self.name(row), "rb") as file:
            return file.read()

    def image_of(self, content: tf.Tensor) -> tf.Tensor:
        return content

    def name(self, row: int) -> str:
        return os.path.join(self._folder, os.fsdecode(bytes(self._names[row])))

    def files(self) -> tuple[str, list[str]]:
        return self._folder, [os.fsdecode(bytes(name)) for name in self._names]


def _test_dir(folder: str) -> str:
    """Return the folder of the test images."""
    for name in _TEST_NAMES:
        if os.path.isdir(path := os.path.join(folder, name)):
            return path
    raise InputError(
        f"--data_dir={folder} has no folder test (or validation, or val); expected {LAYOUT}"
    )


def _class_names(folder: str) -> list[str]:
    """Return the folders in a split's folder, sorted."""
    try:
        with os.scandir(folder) as entries:
            names = [e.name for e in entries if e.is_dir() and not e.name.startswith(".")]
    except OSError as error:
        raise InputError(f"{folder}: {error.strerror}; expected {LAYOUT}") from None
    if not names:
        raise InputError(f"{folder} has no folders of classes; expected {LAYOUT}")
    return sorted(names)


def _find(
    folder: str, names: Sequence[str], class_names: Sequence[str]
) -> tuple[_Files, np.ndarray]:
    """Return the images of these classes in order, and their labels, int32 `[N]`."""
    found: list[str] = []
    labels: list[np.ndarray] = []
    for name in names:
        of_class = _images_below(os.path.join(folder, name))
        if not of_class:
            raise InputError(
                f"{os.path.join(folder, name)} has no images ({', '.join(_ENDINGS)}); put some "
                "there, or remove it"
            )
        found += [os.path.join(name, path) for path in of_class]
        labels.append(np.full(len(of_class), class_names.index(name), np.int32))
    return _Files(folder, found), np.concatenate(labels)


def _images_below(folder: str) -> list[str]:
    """Return the paths, relative to a folder, of the images in it and below it, sorted."""

    def refuse(error: OSError) -> None:
        raise InputError(f"{error.filename}: {error.strerror}; check its permissions")

    found = []
    for parent, _, names in os.walk(folder, onerror=refuse):
        below = os.path.relpath(parent, folder)
        for name in names:  # ._a.png is what macOS puts beside a.png, and no image
            if name.lower().endswith(_ENDINGS) and not name.startswith("."):
                found.append(name if below == "." else os.path.join(below, name))
    return sorted(found)


def _some(names: Sequence[str]) -> str:
    """Return names for a message, the first few of many."""
    return ", ".join(names[:5]) + (f", ... ({len(names)} classes)" if len(names) > 5 else "")
