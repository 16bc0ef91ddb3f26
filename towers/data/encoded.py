"""Splits that do not fit in memory: encoded images are read by number and decoded on the way.

A source knows how many images there are, their labels, and how to read number i; what it keeps in
memory is a label and a place for each, whatever the images weigh.

The order is that of `ArraySplit`, a permutation of the row numbers computed from (seed, epoch). So
resuming is exact and reads nothing that came before, and each epoch is shuffled as a whole.

A batch is read in one call of Python, in which each read lets other threads run; decoding is
TensorFlow's own, in as many threads as there are cores, and its results keep their order.
"""

import contextlib
import dataclasses
import functools
import hashlib
import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import numpy as np
import tensorflow as tf

from towers.builder.kinds import HOST, PROGRAM
from towers.data.headers import check_pixels
from towers.data.pipeline import Data, Split, digest, held_out_rows, shuffled_rows
from towers.errors import InputError

Size = tuple[int, int]  # (height, width)
MAX_PIXELS = 64_000_000  # of an image, decoded: 200 MB, in as many threads as there are cores

_CORES = os.cpu_count() or 1  # not left to autotuning: see `pipeline.prefetched`
_SAMPLES = 16  # images of each split that are decoded at the start
_SIZED_FILES = 20_000  # of more, so many are looked at: a file system may take a millisecond each


@dataclasses.dataclass(frozen=True)
class Reader:
    """What reads in a graph, without this process: both take a row, int64 []."""

    read: Callable[[tf.Tensor], tf.Tensor]  # the encoded image, text []
    path: Callable[[tf.Tensor], tf.Tensor]  # of its file, text []


class Source(Protocol):
    """Where the encoded images of a split are, and their labels, integers `[N]`, N at least 1."""

    labels: np.ndarray

    def read(self, row: int) -> bytes:
        """Return the encoded image of a row, 0..N-1, or raise an OSError."""

    def name(self, row: int) -> str:
        """Return what a person finds the image by."""

    def files(self) -> tuple[str, list[str]]:
        """Return a folder, and the files in it by their relative names."""

    def reader(self, folder: str) -> "Reader":
        """Return what reads in a graph, where relative paths are below a folder."""

    def telling(self, num: int) -> np.ndarray:
        """Return rows that tell, by about so many, whether the files are others: int64 [n]."""


def data_set(
    name: str,
    sources: Mapping[str, Source],
    class_names: Sequence[str],
    size: Size | None,
    max_pixels: int = MAX_PIXELS,
) -> Data:
    """Return a data set of encoded images; try some of them.

    The sources are "train", "test" and, where there is such, "validation". Images are resized to
    `size`; where that is None they must be of one size. None may have more than `max_pixels`.

    Raises:
        InputError: one of those that are tried is damaged or too large, or sizes differ and none is
            given.
    """
    if size and size[0] * size[1] > max_pixels:
        raise InputError(
            f"--image_size={size[0]}x{size[1]} are {size[0] * size[1]:,} pixels, and "
            f"--max_image_pixels={max_pixels:,} are allowed: make it smaller, or allow more"
        )
    first = None
    for source in sources.values():
        last = len(source.labels) - 1
        for row in np.unique(np.linspace(0, last, _SAMPLES).astype(int)).tolist():
            shape = _shape_of(source, row, max_pixels)
            first = first or shape
            if size is None and shape != first:
                raise InputError(_sizes_differ(source.name(row), shape, first))
    shape = (*size, 3) if size else first
    splits = {
        half: EncodedSplit(source, shape, size is not None, max_pixels)
        for half, source in sources.items()
    }
    return Data(name, num_classes=len(class_names), class_names=tuple(class_names), **splits)


class EncodedSplit(Split):
    """A split whose images are read and decoded as they are needed."""

    def __init__(
        self,
        source: Source,
        image_shape: tuple[int, int, int],
        resize: bool,
        max_pixels: int = MAX_PIXELS,
    ):
        """Keep the labels; read nothing. Images of another shape are resized, or are errors."""
        self.size = len(source.labels)
        self.spec = (tf.TensorSpec(image_shape, tf.uint8), tf.TensorSpec([], tf.int32))
        self.source, self._shape, self._resize = source, image_shape, resize
        self._max_pixels = max_pixels
        with tf.device("/cpu:0"):
            self._labels = tf.constant(source.labels, tf.int32)

    def held_out(self, fraction: float) -> tuple[Split, Split]:
        """See `Split.held_out`."""
        rest, held = (_Part(self.source, rows) for rows in held_out_rows(self.size, fraction))
        about = self._shape, self._resize, self._max_pixels
        return tuple(EncodedSplit(part, *about) for part in (rest, held))

    def checksum(self) -> dict[str, Any]:
        """See `Split.checksum`: of names and sizes of the files, wherever they lie, and labels."""
        folder, names = self.source.files()
        found = hashlib.sha256("\0".join(names).encode(errors="surrogateescape"))
        places = np.linspace(0, len(names) - 1, min(len(names), _SIZED_FILES)).astype(int)
        for place in places.tolist():
            found.update(b"%d;" % os.path.getsize(os.path.join(folder, names[place])))
        found.update(digest(self._labels.numpy()).encode())
        kind, sha256 = "names, sizes and labels", found.hexdigest()
        return {"kind": kind, "sha256": sha256, "examples": self.size, "files": len(names)}

    def train_rows(
        self, batch_size: int, *, seed: int, step: int = 0, examples: int = 0
    ) -> tf.data.Dataset:
        """Return what `train_batches` returns, with rows, int64 [B], for examples."""
        rows = shuffled_rows(batch_size, self.size, seed, examples)
        return self._with_draws(rows, batch_size, seed, step, examples)

    def labels(self, rows: tf.Tensor) -> tf.Tensor:
        """Return the labels of these rows."""
        return tf.gather(self._labels, rows)

    def read_there(
        self, rows: tf.data.Dataset, batch_size: int, folder: str, where: str
    ) -> tf.data.Dataset:
        """Return batches (rows `[B]`, images) from batches of rows, read without this process.

        Whoever makes it says on which device; relative paths are there below `folder`, and `where`
        is how a person knows it.
        """
        reader = self.source.reader(folder)

        def read_all(rows: tf.Tensor) -> tf.Tensor:
            return tf.map_fn(
                lambda row: tf.cond(
                    row < self.size, lambda: reader.read(row), lambda: tf.constant(b"")
                ),
                rows,
                fn_output_signature=tf.string,
                parallel_iterations=_CORES,
            )

        def explain(row: tf.Tensor) -> tf.Tensor:
            what = f"row {{}}, on {where}, is damaged, or no PNG, JPEG, BMP or GIF"
            message = [reader.path(row), tf.strings.format(what, row)]
            with tf.control_dependencies([tf.debugging.Assert(False, message)]):
                return tf.constant(False)

        return self._images(rows, batch_size, read_all, explain)

    def _shuffled_batches(self, batch_size: int, seed: int, examples: int) -> tf.data.Dataset:
        rows = shuffled_rows(batch_size, self.size, seed, examples)
        return self._images(rows, batch_size).map(
            lambda rows, images: (images, tf.gather(self._labels, rows))
        )

    def _batches_in_order(self, batch_size: int) -> tf.data.Dataset:
        def cut(rows, images):
            rows = rows[rows < self.size]
            return images[: tf.size(rows)], tf.gather(self._labels, rows)

        firsts = tf.data.Dataset.range(0, self.size, batch_size)
        rows = firsts.map(lambda first: first + tf.range(batch_size, dtype=tf.int64))
        return self._images(rows, batch_size).map(cut)

    def _images(
        self,
        rows: tf.data.Dataset,
        batch_size: int,
        read_all: Callable | None = None,
        explain: Callable | None = None,
    ) -> tf.data.Dataset:
        """Return batches (rows `[B]`, images `[B, H, W, 3]`) from batches of rows `[B]`.

        `read_all` returns what the images of rows `[n]` are read as, `explain` fails with what is
        wrong with a row; by default both are Python's, of this process.

        Rows from `size` on are zeros. An image that cannot be decoded is dropped, the gap is seen,
        and then it is looked into: the error of a decoder does not say which image it had. One row
        of zeros ends each batch on the way, so that there is no endless search for an image that
        can be decoded when none can, as on a disk that has gone away.
        """
        num_read = batch_size + 1
        rows = rows.map(lambda rows: tf.concat([rows, [self.size]], axis=0))
        read_all = read_all or functools.partial(_in_python, self._read, tf.string)
        explain = explain or functools.partial(_in_python, self._explain, tf.bool)

        def read(rows):
            return rows, tf.ensure_shape(read_all(rows), [num_read])

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
                lambda: explain(missing),
            )
            with tf.control_dependencies([good]):
                images = tf.ensure_shape(images, [num_read, *self._shape])
                return expected[:batch_size], images[:batch_size]

        parallel = dict(num_parallel_calls=_CORES, deterministic=True)
        decoded = rows.map(read, **parallel).unbatch().map(decode, **parallel).ignore_errors()
        return tf.data.Dataset.zip(rows, decoded.batch(num_read)).map(check)

    def _read(self, rows: np.ndarray) -> np.ndarray:
        """Read a batch; what cannot be read or is too large, and beyond the end, is empty."""
        contents = np.full(len(rows), b"", object)
        for place, row in enumerate(rows.tolist()):
            if row < self.size:
                with contextlib.suppress(Exception):  # `_explain` finds out which
                    content = self.source.read(row)
                    check_pixels("", content, self._max_pixels)
                    contents[place] = content
        return contents

    def _decode(self, content: tf.Tensor) -> tf.Tensor:
        image = _decode(content)
        if self._resize:
            image = resized(image, self._shape[:2])
        return tf.ensure_shape(image, self._shape)

    def _explain(self, row: int) -> bool:
        """Raise an InputError that says what is wrong with a row."""
        name = self.source.name(int(row))
        shape = _shape_of(self.source, int(row), self._max_pixels)
        if not self._resize and shape != self._shape:
            raise InputError(_sizes_differ(name, shape, self._shape))
        raise InputError(f"{name} could not be read, but now it can: start again to continue")


class _Part:
    """Some rows of a source."""

    def __init__(self, source: Source, rows: np.ndarray):
        self._source, self._rows, self.labels = source, rows, source.labels[rows]

    def read(self, row: int) -> bytes:
        return self._source.read(self._rows[row])

    def name(self, row: int) -> str:
        return self._source.name(self._rows[row])

    def files(self) -> tuple[str, list[str]]:
        return self._source.files()

    def reader(self, folder: str) -> Reader:
        rows, reader = of_program(self._rows), self._source.reader(folder)
        return Reader(
            lambda row: reader.read(tf.gather(rows, row)),
            lambda row: reader.path(tf.gather(rows, row)),
        )

    def telling(self, num: int) -> np.ndarray:
        return spread(len(self.labels), num)


def spread(size: int, num: int) -> np.ndarray:
    """Return about so many rows of 0..size-1, evenly, the first and the last among them."""
    return np.unique(np.linspace(0, size - 1, min(num, size)).astype(np.int64))


def of_program(values: Any) -> tf.Tensor:
    """Return values on this machine, which functions for others take as they are, uncopied."""
    with tf.init_scope(), tf.device(f"{PROGRAM}{HOST}"):
        return tf.constant(values)


def _in_python(function: Callable, dtype: tf.DType, rows: tf.Tensor) -> tf.Tensor:
    return tf.numpy_function(function, [rows], dtype, stateful=False)


def _decode(encoded: tf.Tensor, channels: int = 3) -> tf.Tensor:
    """Decode a PNG, JPEG, BMP or GIF (its first picture), uint8 `[h, w, channels]`."""
    return tf.io.decode_image(encoded, channels, expand_animations=False)


def resized(image: tf.Tensor, size: Size) -> tf.Tensor:
    """Return an image `[h, w, C]` in another size; if it shrinks, all its pixels count."""
    return tf.cast(tf.round(tf.image.resize(image, size, antialias=True)), tf.uint8)


def decoded(name: str, read: Callable[[], bytes], max_pixels: int, channels: int = 3) -> tf.Tensor:
    """Read and decode an image now: uint8 `[h, w, channels]`, on the host.

    Raises:
        InputError: it cannot be read, is damaged, or has more than `max_pixels`; it is named.
    """
    try:
        content = read()
        check_pixels(name, content, max_pixels)
        with tf.device("/cpu:0"):
            return _decode(content, channels)
    except InputError:
        raise
    except OSError as error:
        raise InputError(f"{name} cannot be read: {error.strerror}; mend or remove it") from None
    except Exception:  # of the decoder, or of a record that has changed
        raise InputError(
            f"{name} is damaged, or no PNG, JPEG, BMP or GIF; mend or remove it"
        ) from None


def _shape_of(source: Source, row: int, max_pixels: int) -> tuple[int, int, int]:
    return tuple(decoded(source.name(row), lambda: source.read(row), max_pixels).shape)


def _sizes_differ(name: str, shape: Sequence[int], expected: Sequence[int]) -> str:
    wanted = f"{expected[0]}x{expected[1]}"
    return (
        f"{name} is {shape[0]}x{shape[1]} (height x width), but others are {wanted}: give one size "
        f"to which all are resized, as --image_size={wanted}"
    )
