"""Batches as pure functions of (seed, step, examples), so that resuming at any step is exact.

    split = ArraySplit(images, labels)
    for (images, labels), draws in split.train_batches(128, seed=1, step=40, examples=5120): ...
    for (images, labels), counted in split.eval_batches(1000): ...

An example is (x,), (x, y) or (x, y, sample_weight), each a tensor or a structure of tensors in
dicts and tuples. Training batches are endless and always full, so a batch may span two epochs.
Example number e of a run is in epoch e // size, at position e % size of that epoch's order.
"""

import abc
import copy
import dataclasses
import hashlib
from typing import Any

import numpy as np
import tensorflow as tf

from towers.errors import InputError

Structure = Any  # of tf.nest: dicts and tuples

# Random numbers of each example: for augmentation's bases, its cutout, and one that alternates.
NUM_DRAWS, _BASE_DRAWS, _CUTOUT_DRAWS = 7, 4, 2
_PREFETCH_BATCHES = 2
# TensorFlow's default of 4 rounds leaves neighbors of one epoch visibly related (chi-square of
# their distances 34 per degree of freedom at 20,000 examples); with 8 it is 1.0, as numpy's.
_SHUFFLE_ROUNDS = 8
_SHUFFLE_STREAM = -1  # the draws of step 0, 1, ... are in streams 0, 1, ...
_CUTOUT_STREAM = -2  # and those of the cutout in streams -2, -3, ...
_EPOCH_BEFORE_FIRST = -1  # its order determines which images are mirrored first
_HELD_OUT = 0.1  # part of the training examples that is for testing if nothing else is
_HELD_OUT_KEY = (2016, 0, 0)  # constant, so that a later evaluation finds the same examples
# Without AutoGraph, which needs 0.5 s for the functions of a first pipeline.
_as_written = tf.autograph.experimental.do_not_convert


class Split(abc.ABC):
    """The training, validation or test part of a data set, of `size` examples."""

    size: int
    spec: Structure  # of tf.TensorSpec: one example, without batch axis

    @_as_written
    def train_batches(
        self, batch_size: int, *, seed: int, step: int = 0, examples: int = 0
    ) -> tf.data.Dataset:
        """Return the endless shuffled batches from global step `step` on.

        Args:
            batch_size: B, the global batch. May be larger than the split.
            seed: of the order and the draws.
            step: number of the first batch; its draws depend on (seed, step).
            examples: number of examples before the first batch: `step * batch_size` unless the
                batch size has changed.

        Returns:
            A dataset of (example, draws): the structure of `spec` with an axis of B in front, and
            float32 `[B, NUM_DRAWS]` in [0, 1). An example's last draw changes by 1/2 in each epoch;
            for rows without numbers it is random.
        """
        batches = self._shuffled_batches(batch_size, seed, examples)
        return self._with_draws(batches, batch_size, seed, step, examples)

    @_as_written
    def eval_batches(self, batch_size: int) -> tf.data.Dataset:
        """Return one pass over the split in its own order.

        Returns:
            A dataset of (example, counted). `example` has the structure of `spec` with an axis of B
            in front. `counted`, float32 `[B]`, is 1 for each example, 0 for the padding of the last
            batch.
        """

        def pad(*example):
            num = tf.shape(tf.nest.flatten(example)[0])[0]

            def fill(part):
                rest = [[0, batch_size - num]] + [[0, 0]] * (part.shape.rank - 1)
                return tf.ensure_shape(tf.pad(part, rest), [batch_size, *part.shape[1:]])

            return tf.nest.map_structure(fill, example), fill(tf.ones([num], tf.float32))

        return prefetched(self._batches_in_order(batch_size).map(pad))

    def _with_draws(
        self, batches: tf.data.Dataset, batch_size: int, seed: int, step: int, examples: int
    ) -> tf.data.Dataset:
        def draw(step, start):
            number = start + tf.range(batch_size, dtype=tf.int64)
            # Two streams, so that the bases' draws do not depend on the cutout's.
            streams = (step, _BASE_DRAWS), (_CUTOUT_STREAM - step, _CUTOUT_DRAWS)
            columns = [
                tf.random.stateless_uniform([batch_size, num], seed=[seed, stream], alg="philox")
                for stream, num in streams
            ]
            return tf.concat([*columns, _alternating(number, self.size, seed)[:, None]], axis=1)

        steps = tf.data.Dataset.counter(step), tf.data.Dataset.counter(examples, batch_size)
        return prefetched(tf.data.Dataset.zip(batches, tf.data.Dataset.zip(*steps).map(draw)))

    @abc.abstractmethod
    def held_out(self, fraction: float) -> tuple["Split", "Split"]:
        """Return the remaining part and the held-out part, for testing or validation.

        The held-out examples depend on size and fraction only. Neither part is empty.

        Raises:
            InputError: there is only one example.
        """

    def checksum(self) -> dict[str, Any]:
        """Return {"kind", "sha256", ...} by which the data of two runs are compared.

        The data of the user's own pipelines are not read.
        """
        return {"kind": "pipeline", "sha256": None, "examples": self.size}

    @abc.abstractmethod
    def _shuffled_batches(self, batch_size: int, seed: int, examples: int) -> tf.data.Dataset:
        """Return endless full batches of examples, from example number `examples` on."""

    @abc.abstractmethod
    def _batches_in_order(self, batch_size: int) -> tf.data.Dataset:
        """Return the batches of examples of one pass; the last may be smaller."""


class IndexedSplit(Split):
    """A split whose examples are read by their row numbers."""

    _rows: tf.Tensor | None = None  # this split's rows of the source; None: all

    @_as_written
    def train_rows(
        self, batch_size: int, *, seed: int, step: int = 0, examples: int = 0
    ) -> tf.data.Dataset:
        """See `Split.train_batches`: rows, int64 `[B]`, are in the place of examples."""
        rows = shuffled_rows(batch_size, self.size, seed, examples)
        return self._with_draws(rows, batch_size, seed, step, examples)

    def numbers(self, rows: tf.Tensor) -> np.ndarray:
        """Return the numbers of these rows in the source."""
        return np.asarray(self._source_rows(rows))

    def held_out(self, fraction: float) -> tuple[Split, Split]:
        """See `Split.held_out`: both parts share the source."""
        parts = []
        for rows in held_out_rows(self.size, fraction):
            part = copy.copy(self)
            part.size = len(rows)
            with tf.device("/cpu:0"):
                part._rows = self._source_rows(tf.constant(rows))
            parts.append(part)
        return tuple(parts)

    @abc.abstractmethod
    def _read_rows(self, rows: tf.data.Dataset, batch_size: int) -> tf.data.Dataset:
        """Return the examples of batches of rows, int64, of at most `batch_size`."""

    def _source_rows(self, rows: tf.Tensor) -> tf.Tensor:
        return rows if self._rows is None else tf.gather(self._rows, rows)

    def _shuffled_batches(self, batch_size: int, seed: int, examples: int) -> tf.data.Dataset:
        return self._read_rows(shuffled_rows(batch_size, self.size, seed, examples), batch_size)

    def _batches_in_order(self, batch_size: int) -> tf.data.Dataset:
        firsts = tf.data.Dataset.range(0, self.size, batch_size)
        rows = firsts.map(lambda first: tf.range(first, tf.minimum(first + batch_size, self.size)))
        return self._read_rows(rows, batch_size)


class ArraySplit(IndexedSplit):
    """A split held in memory, once, on the host."""

    def __init__(self, *example: Structure):
        """Copy arrays to the host.

        Args:
            *example: x, y and sample_weight, or the first of these: arrays, or structures of
                arrays in dicts and tuples, with equal numbers of rows, stored as `stored_spec`.
        """
        example = stored(tf.nest.map_structure(np.asarray, example))
        self.spec, self.size = spec_of(example), len(tf.nest.flatten(example)[0])
        with tf.device("/cpu:0"):
            self._arrays = tf.nest.map_structure(tf.constant, example)

    def label_range(self, name: str) -> tuple[int, int]:
        """Return the smallest and the largest label."""
        labels = self._arrays[1].numpy()
        return int(labels.min()), int(labels.max())

    def checked(self, name: str, num_classes: int) -> "ArraySplit":
        """Return the split; raise InputError for a label that is `num_classes` or more.

        Args:
            name: for messages.
            num_classes: number of classes, 0 if targets are none: nothing is checked.
        """
        labels = self._arrays[1].numpy() if num_classes else np.zeros(0)
        if len(wrong := np.flatnonzero(labels >= num_classes)):
            raise InputError(
                f"{name} y: row {wrong[0]} (counted from 0) is {labels[wrong[0]]}; allowed are "
                f"0..{num_classes - 1}"
            )
        return self

    def arrays(self) -> Structure:
        """Return all examples, on the host: the structure of `spec` with an axis in front."""
        return self._arrays if self._rows is None else self.batch(tf.range(self.size))

    def checksum(self) -> dict[str, Any]:
        """See `Split.checksum`: of all bytes."""
        arrays = [
            array.numpy() if array.dtype == tf.string else np.asarray(memoryview(array))  # no copy
            for array in [*tf.nest.flatten(self._arrays), self._rows]
            if array is not None
        ]
        return {"kind": "arrays", "sha256": digest(*arrays), "examples": self.size}

    def batch(self, rows: tf.Tensor) -> Structure:
        """Return these rows of `arrays()`."""
        # Captured tensors, not constants: the arrays are not copied into the graph.
        rows = self._source_rows(rows)
        return tf.nest.map_structure(lambda array: tf.gather(array, rows), self._arrays)

    def _read_rows(self, rows: tf.data.Dataset, batch_size: int) -> tf.data.Dataset:
        return rows.map(self.batch)


@dataclasses.dataclass(frozen=True)
class Data:
    """A data set."""

    name: str  # the value of --dataset
    train: Split
    test: Split
    num_classes: int = 0  # targets are 0..num_classes-1, one for each example; 0: no classes
    class_names: tuple[str, ...] = ()  # "0", "1", ... if they have no names
    validation: Split | None = None
    test_is_held_out: bool = False  # from the training examples, see `data_of`
    notes: tuple[str, ...] = ()  # lines that the start of a run prints

    @property
    def spec(self) -> Structure:
        """One example, see `Split.spec`."""
        return self.train.spec

    @property
    def image_shape(self) -> tuple[int, int, int] | None:
        """The shape (H, W, C) of a stored image, None if examples are not one image each."""
        x = self.spec[0]
        single = isinstance(x, tf.TensorSpec) and x.shape.rank == 3
        image = single and (x.dtype == tf.uint8 or x.dtype.is_floating)
        return tuple(x.shape) if image else None


def data_of(name: str, splits: dict[str, Split], **about: Any) -> Data:
    """Return a data set; without "test" a tenth of the training examples is held out.

    Args:
        name: of the data set.
        splits: "train", and if there are such "test" and "validation".
        **about: other fields of `Data`.
    """
    if "test" in splits:
        return Data(name, **splits, **about)
    train, test = splits["train"].held_out(_HELD_OUT)
    held = f"{test.size} of {splits['train'].size} examples"
    notes = (f"test set    {held}, held out at random, because {name} has no test set",)
    splits = splits | {"train": train, "test": test}
    return Data(name, **splits, **about, notes=notes, test_is_held_out=True)


def stored_spec(spec: Structure) -> Structure:
    """Return the types and shapes in which examples of this spec are stored.

    Floats and sample weights become float32. A y that is one integer, `[]` or `[1]`, is a label,
    int32 `[]`. Everything else stays as it is.
    """

    def as_float32(leaf):
        return tf.TensorSpec(leaf.shape, tf.float32) if leaf.dtype.is_floating else leaf

    x, *rest = spec
    if rest and is_label(rest[0]):
        rest[0] = tf.TensorSpec([], tf.int32)
    weights = tf.nest.map_structure(lambda leaf: tf.TensorSpec(leaf.shape, tf.float32), rest[1:])
    return (*(tf.nest.map_structure(as_float32, part) for part in (x, *rest[:1])), *weights)


def stored(example: Structure) -> Structure:
    """Convert arrays `[N, ...]` to types and shapes of `stored_spec`; texts stay as they are."""

    def convert(array, spec):
        if spec.dtype != tf.string:
            array = array.astype(spec.dtype.as_numpy_dtype, copy=False)
        return array.reshape(len(array), *spec.shape)

    return tf.nest.map_structure(convert, example, stored_spec(spec_of(example)))


def spec_of(example: Structure) -> Structure:
    """Return the spec of the rows of arrays."""
    return tf.nest.map_structure(
        lambda array: tf.TensorSpec(
            array.shape[1:], tf.string if array.dtype.kind in "OSU" else array.dtype
        ),
        example,
    )


def is_label(y: Structure) -> bool:
    """Return whether targets are one integer for each example."""
    return isinstance(y, tf.TensorSpec) and y.dtype.is_integer and y.shape in ([], [1])


def held_out_rows(size: int, fraction: float) -> tuple[np.ndarray, np.ndarray]:
    """Return the remaining rows and the held-out rows, int64, in rising order.

    The rows are chosen at random, since data may be periodic. Neither part is empty.

    Args:
        size: rows are 0..size-1.
        fraction: the part to hold out, 0..1.

    Raises:
        InputError: there is only one row.
    """
    if size < 2:
        raise InputError(f"cannot hold out a part of {size} example; give at least 2")
    num = min(max(1, round(size * fraction)), size - 1)
    with tf.device("/cpu:0"):
        rows, key = tf.range(size, dtype=tf.int64), tf.constant(_HELD_OUT_KEY, tf.int64)
        held = _shuffled(rows, size, key).numpy() < num
    return np.flatnonzero(~held), np.flatnonzero(held)


def shuffled_rows(batch_size: int, size: int, seed: int, examples: int) -> tf.data.Dataset:
    """Return an endless dataset of each batch's rows, int64 `[batch_size]`, in shuffled order.

    Args:
        batch_size: number of rows of a batch, which may span epochs.
        size: number of examples of an epoch.
        seed: of the order.
        examples: number of examples before the first batch, over all epochs.
    """
    starts = tf.data.Dataset.counter(examples, batch_size)
    return starts.map(lambda s: _row(s + tf.range(batch_size, dtype=tf.int64), size, seed))


def _row(number: tf.Tensor, size: int, seed: int) -> tf.Tensor:
    epoch = number // size
    keys = epoch_keys(epoch[0], (number.shape[0] - 1) // size + 2, seed)
    return _shuffled(number % size, size, tf.gather(keys, epoch - epoch[0]))


def _alternating(number: tf.Tensor, size: int, seed: int) -> tf.Tensor:
    """Return a number in [0, 1) for each example of a batch, which changes by 1/2 in each epoch.

    "shift" mirrors half of the images in the first epoch, the others in the second, and so on
    ("alternating flip", Jordan 2024, arXiv:2404.00498).
    """
    row = _row(number, size, seed)
    place = _shuffled(row, size, epoch_keys(tf.constant(_EPOCH_BEFORE_FIRST), 1, seed)[0])
    return tf.cast((2 * place + size * (number // size)) % (2 * size), tf.float32) / (2 * size)


def _shuffled(rows: tf.Tensor, size: int, keys: tf.Tensor) -> tf.Tensor:
    return tf.raw_ops.RandomIndexShuffle(
        index=rows, seed=keys, max_index=tf.constant(size - 1, tf.int64), rounds=_SHUFFLE_ROUNDS
    )


def epoch_keys(first: tf.Tensor, num: int, seed: int) -> tf.Tensor:
    """Return the shuffle keys of successive epochs, int64 `[num, 3]` in 0..2**32-1.

    RandomIndexShuffle uses only the low bits of its seed, 8 of each number for up to 65,536
    examples. With (seed, epoch) it would repeat after 256 epochs, and successive orders would be
    related. So each epoch's key is a block of a Philox stream.

    Args:
        first: number of the first epoch.
        num: number of epochs.
        seed: of the order.
    """
    key, counter = tf.raw_ops.StatelessRandomGetKeyCounter(seed=[seed, _SHUFFLE_STREAM])
    counter += tf.stack([tf.cast(first, tf.uint64), tf.constant(0, tf.uint64)])
    blocks = tf.raw_ops.StatelessRandomUniformFullIntV2(
        shape=[num, 4], key=key, counter=counter, alg=tf.random.Algorithm.PHILOX.value,
        dtype=tf.uint32,
    )  # fmt: skip
    return tf.cast(blocks[:, :3], tf.int64)


def prefetched(batches: tf.data.Dataset) -> tf.data.Dataset:
    """Prepare the next batches while one is used, without autotuning.

    The thread of TensorFlow's autotuning sleeps up to a minute, and deleting an iterator waits for
    it (measured: 14 to 40 s at the end of a run).
    """
    options = tf.data.Options()
    options.autotune.enabled = False
    return batches.prefetch(_PREFETCH_BATCHES).with_options(options)


def digest(*arrays: np.ndarray) -> str:
    """Return the sha256 of the types, shapes and values of arrays, as 64 hex digits."""
    hasher = hashlib.sha256()
    for array in arrays:
        hasher.update(f"{array.dtype.name}{list(array.shape)};".encode())
        if array.dtype == object:  # texts, as TensorFlow gives them
            for text in array.flat:
                hasher.update(b"%d;" % len(text) + text)
        else:
            hasher.update(np.ascontiguousarray(array).reshape(-1).view(np.uint8))
    return hasher.hexdigest()
