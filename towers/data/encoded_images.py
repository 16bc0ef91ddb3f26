"""Splits that do not fit in memory: encoded images are read by row number, and decoded in parallel.

A source has the labels, and reads the image of a row; in memory it keeps a label and a place for
each.

The order is that of `ArraySplit`, a permutation of the row numbers computed from (seed, epoch). So
resuming is exact and reads no earlier images, and each epoch is shuffled as a whole.

Images are read and decoded in as many threads as there are cores, in order.
"""

import hashlib
import io
import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import numpy as np
import tensorflow as tf
from PIL import Image

from towers.data.pipeline import Data, IndexedSplit, digest
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
        sources: "train", "test" and, if there is one, "validation".
        class_names: by label.
        size: to which images are resized; None: all must have the same size.

    Raises:
        InputError: a decoded image is damaged or too large, or sizes differ without `size`.
    """
    first = None
    for source in sources.values():
        for row in evenly_spaced(len(source.labels), _TRIED_IMAGES).tolist():
            shape = tuple(_decoded_row(source, row).shape)
            first = first or shape
            if size is None and shape != first:
                raise InputError(_sizes_differ(source.name(row), shape, first))
    shape = (*size, 3) if size else first
    splits = {
        split: EncodedSplit(source, shape, size is not None) for split, source in sources.items()
    }
    return Data(name, num_classes=len(class_names), class_names=tuple(class_names), **splits)


class EncodedSplit(IndexedSplit):
    """A split whose images are read and decoded when they are needed."""

    def __init__(self, source: Source, image_shape: tuple[int, int, int], resize: bool):
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
        def image(row):
            read = tf.numpy_function(self._image, [row], tf.uint8, stateful=False)
            return tf.ensure_shape(read, self._shape)

        def with_labels(rows, images):
            return tf.ensure_shape(images, [*rows.shape, *self._shape]), self.labels(rows)

        images = rows.map(self._source_rows).unbatch()
        images = images.map(image, num_parallel_calls=_CORES, deterministic=True).batch(batch_size)
        return tf.data.Dataset.zip(rows, images).map(with_labels)

    def _image(self, row: int) -> np.ndarray:
        image = _decoded_row(self.source, int(row))
        if self._resize:
            return resized(image, self._shape[:2]).numpy()
        if image.shape != self._shape:
            raise InputError(_sizes_differ(self.source.name(int(row)), image.shape, self._shape))
        return image.numpy()


def evenly_spaced(size: int, num: int) -> np.ndarray:
    """Return evenly spaced rows with the first and the last, int64, in rising order.

    Args:
        size: rows are 0..size-1.
        num: how many to return at most, 2 or more.
    """
    return np.unique(np.linspace(0, size - 1, min(num, size)).astype(np.int64))


def resized(image: tf.Tensor, size: Size) -> tf.Tensor:
    """Resize an image with antialiasing, on the host.

    Args:
        image: `[h, w, C]`, 0..255.
        size: (height, width) of the result, which is uint8.
    """
    with tf.device("/cpu:0"):
        return tf.cast(tf.round(tf.image.resize(image, size, antialias=True)), tf.uint8)


def decoded(name: str, read: Callable[[], bytes], channels: int = 3) -> tf.Tensor:
    """Read and decode an image eagerly: uint8 `[h, w, channels]`, on the host.

    Args:
        name: of the image, for messages.
        read: returns its content.
        channels: 1, 3 or 4.

    Raises:
        InputError: it cannot be read, is damaged, or larger than Pillow opens; it is named.
    """
    reason = "is damaged, or no PNG, JPEG, BMP or GIF"
    try:
        content = read()
        Image.open(io.BytesIO(content)).close()  # reads the header: pixels may take gigabytes
        with tf.device("/cpu:0"):
            return tf.io.decode_image(content, channels, expand_animations=False)
    except Image.DecompressionBombError:
        reason = f"has more than {2 * Image.MAX_IMAGE_PIXELS:,} pixels"
    except OSError as error:
        if error.strerror:  # Pillow's has none
            reason = f"cannot be read: {error.strerror}"
    except Exception:  # of the decoder, or of a record that has changed
        pass
    raise InputError(f"{name} {reason}; mend or remove it")


def _decoded_row(source: Source, row: int) -> tf.Tensor:
    return decoded(source.name(row), lambda: source.read(row))


def _sizes_differ(name: str, shape: Sequence[int], expected: Sequence[int]) -> str:
    wanted = f"{expected[0]}x{expected[1]}"
    return (
        f"{name} is {shape[0]}x{shape[1]} (height x width), but another is {wanted}: give one size "
        f"to which all are resized, as --image_size={wanted}"
    )
