"""Reads image files in folders, `--dataset=folder`; README.md has their layout.

Labels are 0, 1, ... in the order of the class names. Only the files' names are in memory. Images
are read by Pillow when they are needed, in as many threads as there are cores.
"""

import dataclasses
import hashlib
import os
from collections.abc import Sequence
from typing import Any

import numpy as np
import tensorflow as tf
from PIL import Image

from towers.data.pipeline import Data, IndexedSplit, data_of, digest
from towers.errors import InputError, reason
from towers.formatting import count, first_of

ENDINGS = (".png", ".jpg", ".jpeg", ".bmp", ".gif")
_HIDDEN = ".", "__MACOSX"  # how names of files and folders begin that are left out
Size = tuple[int, int]  # (height, width)

_EXPECTED = "expected DIR/train/CLASS/*.png and DIR/test/CLASS/*.png, or DIR/CLASS/*.png"
_CORES = os.cpu_count() or 1  # not left to autotuning: see `pipeline.prefetched`
_TRIED_IMAGES = 16  # of each split, at the start
_SIZED_FILES = 20_000  # most files whose size is read: it may take a millisecond each
_MODES = {1: "L", 3: "RGB", 4: "RGBA"}  # Pillow's, by the number of channels


def load(folder: str, size: Size | None) -> Data:
    """Find the images in DIR, to be read as uint8 `[H, W, 3]`; read a few of them.

    Args:
        folder: DIR.
        size: (height, width) to which images are resized; None: all must have the same size.

    Raises:
        InputError: a folder is missing, empty or cannot be read; test has a class that train lacks;
            sizes differ and `size` is None; or an image is damaged.
    """
    train = os.path.join(folder, "train")
    names = [n for n in ("test", "validation", "val") if os.path.isdir(os.path.join(folder, n))]
    if alone := not (names or os.path.isdir(train)):
        train = folder
    tops = {"train": train} | ({"test": os.path.join(folder, names[0])} if names else {})
    if len(names) > 1 and names[0] == "test":
        tops["validation"] = os.path.join(folder, names[1])
    class_names, found, others, notes = _class_names(train), {}, [], []
    for split, top in tops.items():
        paths, labels = [], []
        for name in _class_names(top):
            of_class = os.path.join(top, name)
            if name not in class_names:
                has = first_of(class_names)
                raise InputError(f"{of_class} is a class that {train} lacks; it has {has}")
            images = images_below(of_class, others)
            if alone and any(os.path.dirname(image) != of_class for image in images):
                raise InputError(  # of another layout?
                    f"--data_dir={folder} has no folder train, and its folder {name} has folders "
                    f"of images; {_EXPECTED}"
                )
            if not images:
                raise InputError(
                    f"{of_class} has no images ({', '.join(ENDINGS)}); add some, or remove it"
                )
            paths += images
            labels += [class_names.index(name)] * len(images)
        found[split] = paths, labels
        if absent := [n for i, n in enumerate(class_names) if i not in labels]:
            notes.append(f"note        {top} has no images of {first_of(absent)}")
    if others:
        skipped = f"{count(len(others), 'file')} (not images): {first_of(sorted(others), 3)}"
        notes.append(f"note        skipped {skipped}")
    shape, splits = None, {}
    for split, (paths, labels) in found.items():
        for row in _evenly_spaced(len(paths), _TRIED_IMAGES):
            shape = read_image(paths[row], size, expected=shape).shape
        names = [path[len(tops[split]) + 1 :] for path in paths]
        splits[split] = ImageSplit(tops[split], names, labels, shape, size)
    about = dict(num_classes=len(class_names), class_names=tuple(class_names))
    data = data_of("folder", splits, **about)
    return dataclasses.replace(data, notes=(*data.notes, *notes))


class ImageSplit(IndexedSplit):
    """A split whose images are read when they are needed."""

    def __init__(
        self,
        folder: str,
        names: Sequence[str],
        labels: Sequence[int],
        shape: tuple[int, int, int],
        size: Size | None,
    ):
        """Set the files and the shape of images.

        Args:
            folder: of the files.
            names: of the files, relative to the folder.
            labels: of the images.
            shape: (height, width, 3) of all images.
            size: (height, width) to which they are resized; None: another shape is an error.
        """
        self.size = len(labels)
        self.spec = (tf.TensorSpec(shape, tf.uint8), tf.TensorSpec([], tf.int32))
        self._folder, self._image_size = folder, size
        self._names = np.array([os.fsencode(name) for name in names])  # compact: no object each
        with tf.device("/cpu:0"):
            self._labels = tf.constant(labels, tf.int32)

    def checksum(self) -> dict[str, Any]:
        """See `Split.checksum`: of the labels and the files' relative names and sizes."""
        hasher, num = hashlib.sha256(b"\0".join(self._names.tolist())), len(self._names)
        for place in _evenly_spaced(num, _SIZED_FILES):
            hasher.update(b"%d;" % os.path.getsize(self._path(place)))
        labels = tf.gather(self._labels, self._source_rows(tf.range(self.size)))
        hasher.update(digest(labels.numpy()).encode())
        kind, sha256 = "names, sizes and labels", hasher.hexdigest()
        return {"kind": kind, "sha256": sha256, "examples": self.size, "files": num}

    def _path(self, row: int) -> str:
        return os.path.join(self._folder, os.fsdecode(bytes(self._names[row])))

    def _read(self, row: np.int64) -> np.ndarray:
        shape = tuple(self.spec[0].shape)
        return read_image(self._path(int(row)), self._image_size, expected=shape)

    def _read_rows(self, rows: tf.data.Dataset, batch_size: int) -> tf.data.Dataset:
        spec = self.spec[0]

        def read(row: tf.Tensor) -> tf.Tensor:
            pixels = tf.numpy_function(self._read, [row], spec.dtype, stateful=False)
            return tf.ensure_shape(pixels, spec.shape)

        def join(rows: tf.Tensor, images: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
            images = tf.ensure_shape(images, [*rows.shape, *spec.shape])
            return images, tf.gather(self._labels, rows)

        rows = rows.map(self._source_rows)
        images = rows.unbatch().map(read, num_parallel_calls=_CORES, deterministic=True)
        return tf.data.Dataset.zip(rows, images.batch(batch_size)).map(join)


def read_image(
    path: str,
    size: Size | None = None,
    channels: int = 3,
    expected: tuple[int, int, int] | None = None,
) -> np.ndarray:
    """Read an image, the first one of a GIF: uint8 `[height, width, channels]`.

    Args:
        path: of the file.
        size: (height, width) to which it is resized; None: its own.
        channels: 1, 3 or 4.
        expected: the shape that it must have; None: any.

    Raises:
        InputError: it cannot be read, or has another shape; it is named.
    """
    try:
        with Image.open(path) as file:
            if file.mode[0] in "IF":  # Pillow would clip them
                raise InputError(f"{path} has more than 8 bits per channel; convert it to 8")
            image = file.convert(_MODES[channels])
            if size and image.size != size[::-1]:
                image = image.resize(size[::-1], Image.Resampling.BILINEAR)
        pixels = np.asarray(image).reshape(image.height, image.width, channels)
    except InputError:
        raise
    except Exception as error:  # Pillow raises many kinds
        raise InputError(
            f"{path} cannot be read: {reason(error)}; repair, convert or remove it"
        ) from None
    if expected and pixels.shape != expected:
        wanted = f"{expected[0]}x{expected[1]}"
        raise InputError(
            f"{path} is {pixels.shape[0]}x{pixels.shape[1]} (height x width), but another is "
            f"{wanted}; resize all images to one size, such as --image_size={wanted}"
        )
    return pixels


def images_below(folder: str, others: list[str] | None = None) -> list[str]:
    """Return the paths of the images in a folder and those below, sorted.

    Args:
        folder: the folder.
        others: if given, the paths of files that are no images are added; hidden ones are not.

    Raises:
        InputError: a folder cannot be read.
    """
    paths, waiting = [], [folder]
    try:
        for parent in waiting:  # the list grows; os.walk calls itself, at most 1000 deep
            with os.scandir(parent) as entries:
                for entry in entries:
                    if entry.name.startswith(_HIDDEN):  # as ._a.png, which macOS puts beside a.png
                        continue
                    is_other = not entry.is_file() and os.path.exists(entry.path)  # as a pipe
                    if entry.is_dir(follow_symlinks=False):
                        waiting.append(entry.path)
                    elif entry.name.lower().endswith(ENDINGS) and not is_other:
                        paths.append(entry.path)
                    elif others is not None:
                        others.append(entry.path)
    except OSError as error:
        raise InputError(f"{error.filename} cannot be read: {reason(error)}") from None
    return sorted(paths)


def _class_names(folder: str) -> list[str]:
    try:
        with os.scandir(folder) as entries:
            names = [e.name for e in entries if e.is_dir() and not e.name.startswith(_HIDDEN)]
    except OSError as error:
        raise InputError(f"{folder}: {error.strerror}; {_EXPECTED}") from None
    if not names:
        raise InputError(f"{folder} has no folders of classes; {_EXPECTED}")
    return sorted(names)


def _evenly_spaced(size: int, num: int) -> list[int]:
    # At most `num` of the numbers 0..size-1, with the first and the last, in rising order.
    return np.unique(np.linspace(0, size - 1, min(num, size)).astype(np.int64)).tolist()
