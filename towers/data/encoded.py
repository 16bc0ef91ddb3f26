"""Splits that do not fit in memory: encoded images are read by number and decoded on the way.

A source knows how many images there are, their labels, and how to read number i; what it keeps in
memory is a label and a place for each, whatever the images weigh:

    split = EncodedSplit(source, labels, image_shape=(64, 64, 3), resize=True)
    for images, labels, draws in split.train_batches(128, seed=1, step=40, examples=5120): ...

The order is that of `ArraySplit`, a permutation of the row numbers computed from (seed, epoch). So
resuming is exact and reads nothing that came before, and each epoch is shuffled as a whole.

A batch is read in one call of Python, in which each read lets other threads run; decoding is
TensorFlow's own, in as many threads as there are cores, and its results keep their order.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np
import tensorflow as tf

from towers.data import checksum
from towers.data.pipeline import check_batches, prefetched, shuffled_rows, step_draws
from towers.errors import InputError

Size = tuple[int, int]  # (height, width)

_CORES = os.cpu_count() or 1  # not left to autotuning: see `pipeline.prefetched`
_SAMPLES = 16  # images of each split that are decoded at the start


class Source(Protocol):
    """Where the encoded images of a split are.

    Attributes:
        size: number of images.
    """

    size: int

    def read(self, row: int) -> bytes:
        """Return what is stored under a row, 0..size-1.

        Raises:
            OSError: it cannot be read.
        """

    def image_of(self, content: tf.Tensor) -> tf.Tensor:
        """Return the encoded image, a string `[]`, that is in what `read` returned."""

    def name(self, row: int) -> str:
        """Return what a person finds the image by."""

    def files(self) -> tuple[str, list[str]]:
        """Return a folder, and the files in it by their relative names."""


class EncodedSplit:
    """A split whose images are read and decoded as they are needed."""

    def __init__(
        self, source: Source, labels: np.ndarray, image_shape: tuple[int, int, int], resize: bool
    ):
        """Keep the labels; read nothing.

        Args:
            source: the images, at least 1.
            labels: integers `[N]`.
            image_shape: (H, W, 3) of each image.
            resize: whether images of other sizes are resized to that shape. Else they are errors.
        """
        self.size = source.size
        self._source, self._shape, self._resize = source, image_shape, resize
        with tf.device("/cpu:0"):
            self._labels = tf.constant(labels, tf.int32)

    def train_batches(
        self, batch_size: int, *, seed: int, step: int = 0, examples: int = 0
    ) -> tf.data.Dataset:
        """See `Split.train_batches`."""
        check_batches(batch_size, step, examples)

        def rows(index):
            return shuffled_rows(examples + index * batch_size, batch_size, self.size, seed)

        def batch(step, rows, images):
            return images, tf.gather(self._labels, rows), step_draws(batch_size, seed, step)

        images = self._images(tf.data.Dataset.counter().map(rows), batch_size)
        steps = tf.data.Dataset.counter(step)
        both = tf.data.Dataset.zip(steps, images)
        return prefetched(both.map(lambda step, images: batch(step, *images)))

    def eval_batches(self, batch_size: int) -> tf.data.Dataset:
        """See `Split.eval_batches`."""
        check_batches(batch_size)

        def batch(rows, images):
            weights = tf.cast(rows < self.size, tf.float32)
            labels = tf.gather(self._labels, tf.minimum(rows, self.size - 1))
            return images, labels * tf.cast(weights, tf.int32), weights

        firsts = tf.data.Dataset.range(0, self.size, batch_size)
        rows = firsts.map(lambda first: first + tf.range(batch_size, dtype=tf.int64))
        return prefetched(self._images(rows, batch_size).map(batch))

    def checksum(self) -> dict[str, Any]:
        """See `Split.checksum`."""
        size = {"image_shape": list(self._shape), "resized": self._resize}
        return checksum.of_files(*self._source.files(), self._labels) | size

    def _images(self, rows: tf.data.Dataset, batch_size: int) -> tf.data.Dataset:
        """Return batches (rows `[B]`, images `[B, H, W, 3]`) from batches of rows `[B]`.

        Rows from `size` on are zeros. An image that cannot be decoded is dropped, the gap is seen,
        and then it is looked into: the error of a decoder does not say which image it had. One row
        of zeros ends each batch on the way, so that there is no endless search for an image that
        can be decoded when none can, as on a disk that has gone away.
        """
        num_read = batch_size + 1
        rows = rows.map(lambda rows: tf.concat([rows, [self.size]], axis=0))

        def read(rows):
            contents = tf.numpy_function(self._read, [rows], tf.string, stateful=False)
            return rows, tf.ensure_shape(contents, [num_read])

        def decode(row, content):
            return row, tf.cond(
                row < self.size,
                lambda: self._decode(content),
                lambda: tf.zeros(self._shape, tf.uint8),
            )

        def check(expected, found):
            rows, images = found
            gap = [[0, num_read - tf.size(rows)]]
            same = tf.pad(rows, gap, constant_values=-1) == expected
            missing = tf.gather(expected, tf.argmin(tf.cast(same, tf.int32)))
            good = tf.cond(
                tf.reduce_all(same),
                lambda: True,
                lambda: tf.numpy_function(self._explain, [missing], tf.bool),
            )
            with tf.control_dependencies([good]):
                images = tf.ensure_shape(images, [num_read, *self._shape])
                return expected[:batch_size], images[:batch_size]

        parallel = dict(num_parallel_calls=_CORES, deterministic=True)
        decoded = rows.map(read, **parallel).unbatch().map(decode, **parallel).ignore_errors()
        return tf.data.Dataset.zip(rows, decoded.batch(num_read)).map(check)

    def _read(self, rows: np.ndarray) -> np.ndarray:
        """Read a batch; what cannot be read, and what is beyond the end, is empty."""
        contents = np.empty(len(rows), object)
        for place, row in enumerate(rows.tolist()):
            try:
                contents[place] = self._source.read(row) if row < self.size else b""
            except OSError:
                contents[place] = b""
        return contents

    def _decode(self, content: tf.Tensor) -> tf.Tensor:
        image = decode(self._source.image_of(content))
        if self._resize:
            image = resized(image, self._shape[:2])
        return tf.ensure_shape(image, self._shape)

    def _explain(self, row: int) -> bool:
        """Raise an InputError that says what is wrong with a row."""
        name, shape = self._source.name(int(row)), shape_of(self._source, int(row))
        if not self._resize and shape != self._shape:
            raise InputError(_sizes_differ(name, shape, self._shape))
        raise InputError(f"{name} could not be read, but now it can: start again to continue")


def decode(encoded: tf.Tensor) -> tf.Tensor:
    """Decode a PNG, JPEG, BMP or GIF (its first picture) to RGB, uint8 `[h, w, 3]`.

    Raises:
        tf.errors.InvalidArgumentError: it is none, or damaged.
    """
    return tf.io.decode_image(encoded, channels=3, expand_animations=False)


def resized(image: tf.Tensor, size: Size) -> tf.Tensor:
    """Resize an image, uint8 `[h, w, C]`, as a whole; when it shrinks, all its pixels count."""
    return tf.cast(tf.round(tf.image.resize(image, size, antialias=True)), tf.uint8)


def common_shape(sources: Sequence[Source], size: Size | None) -> tuple[int, int, int]:
    """Return the shape that images are to have, and try some of them.

    Args:
        sources: of the splits.
        size: what they are resized to; None: they must be of one size.

    Raises:
        InputError: one of those that are tried is damaged, or sizes differ and none is given.
    """
    first = None
    for source in sources:
        for row in np.unique(np.linspace(0, source.size - 1, _SAMPLES).astype(int)).tolist():
            shape = shape_of(source, row)
            first = first or shape
            if size is None and shape != first:
                raise InputError(_sizes_differ(source.name(row), shape, first))
    return (*size, 3) if size else first


def shape_of(source: Source, row: int) -> tuple[int, int, int]:
    """Decode an image and return its shape.

    Raises:
        InputError: it cannot be read or decoded; the message names it.
    """
    name = source.name(row)
    try:
        with tf.device("/cpu:0"):
            return tuple(decode(source.image_of(tf.constant(source.read(row)))).shape)
    except OSError as error:
        raise InputError(f"{name} cannot be read: {error.strerror}; mend or remove it") from None
    except tf.errors.OpError:
        raise InputError(
            f"{name} is damaged, or no PNG, JPEG, BMP or GIF; mend or remove it"
        ) from None


def _sizes_differ(name: str, shape: Sequence[int], expected: Sequence[int]) -> str:
    height, width = expected[:2]
    wanted = f"{height}" if height == width else f"{height}x{width}"
    return (
        f"{name} is {shape[0]}x{shape[1]} (height x width), but others are {height}x{width}: give "
        f"one size to which all are resized, as --image_size={wanted}"
    )
