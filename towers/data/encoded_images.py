"""Splits that do not fit in memory: encoded images are read by row number, and decoded in parallel.

A source has the labels, and reads the image of a row; in memory it keeps a label and a place for
each.

The order is that of `ArraySplit`, a permutation of the row numbers computed from (seed, epoch). So
resuming is exact and reads no earlier images, and each epoch is shuffled as a whole.

A batch is read in one call of Python, which releases the lock at each read; TensorFlow decodes in
as many threads as there are cores, in order.
"""

import contextlib
import functools
import hashlib
import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import numpy as np
import tensorflow as tf

from towers.data.pipeline import Data, IndexedSplit, data_of, digest
from towers.errors import InputError

Size = tuple[int, int]  # (height, width)

_CORES = os.cpu_count() or 1  # not left to autotuning: see `pipeline.prefetched`
_TRIED_IMAGES = 16  # of each split, at the start
_SIZED_FILES = 20_000  # most files whose size is read: it may take a millisecond each


class Source(Protocol):
    """The encoded images of a split, and their labels, integers `[N]`, N at least 1."""

    labels: np.ndarray

    def read(self, row: int) -> bytes:
        """Return the encoded image of a row, 0..N-1, or raise an OSError."""

    def name(self, row: int) -> str:
        """Return the image's name for messages."""

    def files(self) -> tuple[str, list[str]]:
        """Return a folder, and the relative names of the files in it."""


def data_set(
    name: str,
    sources: Mapping[str, Source],
    class_names: Sequence[str],
    size: Size | None,
) -> Data:
    """Return a data set of encoded images, after decoding some of them.

    Args:
        name: the value of --dataset.
        sources: "train", and if there are such "test" and "validation".
        class_names: by label.
        size: to which images are resized; None: all must have the same size.

    Raises:
        InputError: a decoded image is damaged, or sizes differ without `size`.
    """
    first = None
    for source in sources.values():
        for row in evenly_spaced(len(source.labels), _TRIED_IMAGES).tolist():
            first = _shape_of(source, row, None if size else first)
    shape = (*size, 3) if size else first
    splits = {
        split: EncodedSplit(source, shape, size is not None) for split, source in sources.items()
    }
    num_classes, class_names = len(class_names), tuple(class_names)
    return data_of(name, splits, num_classes=num_classes, class_names=class_names)


class EncodedSplit(IndexedSplit):
    """A split whose images are read and decoded when they are needed."""

    def __init__(
        self,
        source: Source,
        image_shape: tuple[int, int, int],
        resize: bool,
    ):
        """Set the source and the shape of images.

        Args:
            source: of the encoded images.
            image_shape: (height, width, channels) of all.
            resize: whether others are resized; else they raise an error.
        """
        self.size = len(source.labels)
        self.spec = (tf.TensorSpec(image_shape, tf.uint8), tf.TensorSpec([], tf.int32))
        self.source, self._shape, self._resize = source, image_shape, resize
        with tf.device("/cpu:0"):
            self._labels = tf.constant(source.labels, tf.int32)

    def checksum(self) -> dict[str, Any]:
        """See `Split.checksum`: of the labels and the files' relative names and sizes."""
        folder, names = self.source.files()
        hasher = hashlib.sha256("\0".join(names).encode(errors="surrogateescape"))
        for place in evenly_spaced(len(names), _SIZED_FILES).tolist():
            hasher.update(b"%d;" % os.path.getsize(os.path.join(folder, names[place])))
        hasher.update(digest(self.labels(tf.range(self.size)).numpy()).encode())
        kind, sha256 = "names, sizes and labels", hasher.hexdigest()
        return {"kind": kind, "sha256": sha256, "examples": self.size, "files": len(names)}

    def labels(self, rows: tf.Tensor) -> tf.Tensor:
        """Return the labels of these rows."""
        return tf.gather(self._labels, self._source_rows(rows))

    def _read_rows(self, rows: tf.data.Dataset, batch_size: int) -> tf.data.Dataset:
        """Return batches from batches of at most `batch_size` rows.

        A decoder's error does not name the image. So an image that cannot be decoded is dropped,
        its row is found missing, and `_explain` decodes it again. A row of zeros ends each batch,
        so that the search for an image ends when none can be decoded, as on a disk that is gone.
        """
        end = [[0, 1]]

        def in_python(function: Callable, dtype: tf.DType, rows: tf.Tensor) -> tf.Tensor:
            return tf.numpy_function(function, [self._source_rows(rows)], dtype, stateful=False)

        def read(rows):
            contents = tf.ensure_shape(in_python(self._read, tf.string, rows), rows.shape)
            return tf.pad(rows, end, constant_values=-1), tf.pad(contents, end)

        def decode(row, content):
            def image():
                pixels = _decode(content)
                pixels = resized(pixels, self._shape[:2]) if self._resize else pixels
                return tf.ensure_shape(pixels, self._shape)

            return row, tf.cond(row >= 0, image, lambda: tf.zeros(self._shape, tf.uint8))

        def check(rows, decoded):
            decoded_rows, images = decoded
            expected = tf.pad(rows, end, constant_values=-1)
            missed = [[0, tf.size(expected) - tf.size(decoded_rows)]]
            same = tf.pad(decoded_rows, missed, constant_values=-2) == expected
            missing = tf.gather(expected, tf.argmin(tf.cast(same, tf.int32)))
            explain = functools.partial(in_python, self._explain, tf.bool, missing)
            good = tf.cond(tf.reduce_all(same), lambda: True, explain)
            with tf.control_dependencies([good]):
                images = images[: tf.size(rows)]
                images = tf.ensure_shape(images, [*rows.shape, *self._shape])
                return images, self.labels(rows)

        parallel = dict(num_parallel_calls=_CORES, deterministic=True)
        decoded = rows.map(read, **parallel).unbatch().map(decode, **parallel).ignore_errors()
        return tf.data.Dataset.zip(rows, decoded.batch(batch_size + 1)).map(check)

    def _read(self, rows: np.ndarray) -> np.ndarray:
        # An image that cannot be read is empty.
        contents = np.full(len(rows), b"", object)
        for place, row in enumerate(rows.tolist()):
            with contextlib.suppress(Exception):  # `_explain` raises it
                contents[place] = self.source.read(row)
        return contents

    def _explain(self, row: int) -> bool:
        _shape_of(self.source, int(row), None if self._resize else self._shape)
        name = self.source.name(int(row))
        raise InputError(f"{name} could not be read, but now it can: start again to continue")


def evenly_spaced(size: int, num: int) -> np.ndarray:
    """Return evenly spaced rows with the first and the last, int64, in rising order.

    Args:
        size: rows are 0..size-1.
        num: how many to return at most, 2 or more.
    """
    return np.unique(np.linspace(0, size - 1, min(num, size)).astype(np.int64))


def _decode(encoded: tf.Tensor, channels: int = 3) -> tf.Tensor:
    return tf.io.decode_image(encoded, channels, expand_animations=False)  # the first of a GIF


def resized(image: tf.Tensor, size: Size) -> tf.Tensor:
    """Resize an image with antialiasing.

    Args:
        image: `[h, w, C]`, 0..255.
        size: (height, width) of the result, which is uint8.
    """
    return tf.cast(tf.round(tf.image.resize(image, size, antialias=True)), tf.uint8)


def decoded(name: str, read: Callable[[], bytes], channels: int = 3) -> tf.Tensor:
    """Read and decode an image eagerly: uint8 `[h, w, channels]`, on the host.

    Args:
        name: of the image, for messages.
        read: returns its content.
        channels: 1, 3 or 4; 0: those of the image.

    Raises:
        InputError: it cannot be read, or is damaged; it is named.
    """
    try:
        with tf.device("/cpu:0"):
            return _decode(read(), channels)
    except OSError as error:
        raise InputError(f"{name} cannot be read: {error.strerror}; mend or remove it") from None
    except Exception:  # of the decoder, or of a record that has changed
        raise InputError(
            f"{name} is damaged, or no PNG, JPEG, BMP or GIF; mend or remove it"
        ) from None


def _shape_of(
    source: Source, row: int, expected: tuple[int, int, int] | None
) -> tuple[int, int, int]:
    name = source.name(row)
    shape = tuple(decoded(name, lambda: source.read(row)).shape)
    if expected and shape != expected:
        wanted = f"{expected[0]}x{expected[1]}"
        raise InputError(
            f"{name} is {shape[0]}x{shape[1]} (height x width), but another is {wanted}: give one "
            f"size to which all are resized, as --image_size={wanted}"
        )
    return shape
