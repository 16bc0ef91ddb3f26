"""Batches as pure functions of (seed, step, examples), so that resuming at any step is exact.

    split = ArraySplit(images, labels)
    for images, labels, draws in split.train_batches(128, seed=1, step=40, examples=5120): ...
    for images, labels, weights in split.eval_batches(1000): ...

Training batches are endless and always full. Example number e of a run (counted from 0 over all
epochs) is in epoch e // size, at position e % size of that epoch's order; a batch may straddle two
epochs. `draws` feeds `towers.data.augment`. Evaluation is one pass in order, the last batch padded
with examples of weight 0.
"""

import abc
import dataclasses
import hashlib
from typing import Any

import numpy as np
import tensorflow as tf

from towers.data import augment

_PREFETCH_BATCHES = 2
# TensorFlow's default of 4 rounds leaves neighbours of one epoch visibly related (chi-square of
# their distances 34 per degree of freedom at 20,000 examples); with 8 it is 1.0, as numpy's.
_SHUFFLE_ROUNDS = 8
_SHUFFLE_STREAM = -1  # keeps the shuffle's random numbers apart from the draws of step 0, 1, ...
_SHUFFLE_BUFFER_BYTES = 256 * 2**20
_PHILOX = 1  # the number that TensorFlow's raw ops know the algorithm by


class Split(abc.ABC):
    """The training or the test half of a data set, of `size` examples."""

    size: int

    def train_batches(
        self, batch_size: int, *, seed: int, step: int = 0, examples: int = 0
    ) -> tf.data.Dataset:
        """Return the endless shuffled batches from global step `step` on.

        Args:
            batch_size: B, the global batch. May be larger than the split.
            seed: of the order and the draws.
            step: number of the first batch; its draws are those of (seed, step).
            examples: number of examples seen before the first batch; they fix its place in the
                order. It is `step * batch_size` unless the batch size has changed on the way.

        Returns:
            A dataset of (images `[B, H, W, C]` uint8 or float32, labels int32 `[B]`, draws float32
            `[B, augment.NUM_DRAWS]` in [0, 1)). Row i of draws belongs to example i of the batch.
        """

        def draw(step):
            shape = [batch_size, augment.NUM_DRAWS]
            return tf.random.stateless_uniform(shape, seed=[seed, step], alg="philox")

        draws = tf.data.Dataset.counter(step).map(draw)
        both = tf.data.Dataset.zip(self._shuffled_batches(batch_size, seed, examples), draws)
        return prefetched(both.map(lambda batch, draws: (*batch, draws)))

    def eval_batches(self, batch_size: int) -> tf.data.Dataset:
        """Return one pass over the split in its own order.

        Returns:
            A dataset of (images `[B, H, W, C]`, labels int32 `[B]`, weights float32 `[B]`): weight
            1 for each example, 0 for the zeros that fill the last batch.
        """
        batches = self._batches_in_order(batch_size)
        return prefetched(batches.map(lambda *batch: _padded(*batch, batch_size)))

    @abc.abstractmethod
    def checksum(self) -> dict[str, Any]:
        """Return "kind", "sha256" and more: whether two runs were given the same data."""

    @abc.abstractmethod
    def _shuffled_batches(self, batch_size: int, seed: int, examples: int) -> tf.data.Dataset:
        """Return full batches (images, labels) without end, `examples` being before the first."""

    @abc.abstractmethod
    def _batches_in_order(self, batch_size: int) -> tf.data.Dataset:
        """Return the batches (images, labels) of one pass, the last with what is left."""


@dataclasses.dataclass(frozen=True)
class Data:
    """A data set."""

    name: str  # as --dataset gave it
    train: Split
    test: Split
    num_classes: int  # labels are 0..num_classes-1
    image_shape: tuple[int, int, int]  # of a stored image
    class_names: tuple[str, ...]  # "0", "1", ... where there are none


class ArraySplit(Split):
    """A split held in memory, once, on the host."""

    def __init__(self, images: np.ndarray, labels: np.ndarray):
        """Copy images, uint8 or float32 `[N, H, W, C]`, and labels, integers `[N]`, to the host."""
        self.size = len(images)
        with tf.device("/cpu:0"):
            self._images = tf.constant(images)
            self._labels = tf.constant(labels, tf.int32)

    def checksum(self) -> dict[str, Any]:
        """See `Split.checksum`: of all bytes."""
        images, labels = (np.asarray(memoryview(part)) for part in (self._images, self._labels))
        sha256, shape = digest(images, labels), list(images.shape)
        return {"kind": "arrays", "sha256": sha256, "shape": shape, "dtype": images.dtype.name}

    def _shuffled_batches(self, batch_size: int, seed: int, examples: int) -> tf.data.Dataset:
        # Captured tensors, not constants: the images are not copied into the graph.
        return shuffled_rows(batch_size, self.size, seed, examples).map(
            lambda rows: (tf.gather(self._images, rows), tf.gather(self._labels, rows))
        )

    def _batches_in_order(self, batch_size: int) -> tf.data.Dataset:
        firsts = tf.data.Dataset.range(0, self.size, batch_size)
        slices = firsts.map(lambda first: (first, first + batch_size))
        return slices.map(lambda start, end: (self._images[start:end], self._labels[start:end]))


class DatasetSplit(Split):
    """A split that is read from a `tf.data.Dataset` of the user's.

    It is shuffled with a buffer of at most 256 MiB, anew in each epoch. A run that is resumed reads
    and drops what came before its place in the epoch, and goes on exactly if the dataset gives the
    same examples in the same order each time that it is read. A dataset that gives more or fewer
    examples than its size stops the reading with a `tf.errors.FailedPreconditionError`.
    """

    def __init__(self, dataset: tf.data.Dataset, size: int):
        """Wrap a dataset.

        Args:
            dataset: finite, of single examples: image `[H, W, C]`, uint8 or float (read as
                float32), and label, an integer, `[]` or `[1]`.
            size: how many examples it gives, 1 or more.
        """
        self.size = size
        self._dataset = dataset.map(_example).apply(tf.data.experimental.assert_cardinality(size))

    def checksum(self) -> dict[str, Any]:
        """See `Split.checksum`: the user's code is not read through."""
        return {"kind": "pipeline", "sha256": None, "examples": self.size}

    def _shuffled_batches(self, batch_size: int, seed: int, examples: int) -> tf.data.Dataset:
        epoch, position = divmod(examples, self.size)
        epochs = tf.data.Dataset.counter(epoch).flat_map(lambda epoch: self._shuffled(epoch, seed))
        return epochs.skip(position).batch(batch_size, drop_remainder=True)

    def _batches_in_order(self, batch_size: int) -> tf.data.Dataset:
        return self._dataset.batch(batch_size)

    def _shuffled(self, epoch: tf.Tensor, seed: int) -> tf.data.Dataset:
        spec = self._dataset.element_spec
        example_bytes = spec[0].shape.num_elements() * spec[0].dtype.size
        key = _epoch_keys(epoch, 1, seed)[0]
        # Dataset.shuffle would mix in tf.random.set_seed: the order would depend on the program.
        variant = tf.raw_ops.ShuffleDataset(
            input_dataset=tf.data.experimental.to_variant(self._dataset),
            buffer_size=max(1, min(self.size, _SHUFFLE_BUFFER_BYTES // max(1, example_bytes))),
            seed=key[0],
            seed2=key[1] + 1,  # both 0 would mean: another order each time
            reshuffle_each_iteration=False,
            output_types=[part.dtype for part in spec],
            output_shapes=[part.shape for part in spec],
        )
        return tf.data.experimental.from_variant(variant, spec)


def shuffled_rows(batch_size: int, size: int, seed: int, examples: int) -> tf.data.Dataset:
    """Return the rows, int64 `[B]`, of each batch, without end, from example `examples` on."""

    def rows(index):
        number = examples + index * batch_size + tf.range(batch_size, dtype=tf.int64)
        epoch = number // size
        keys = _epoch_keys(epoch[0], (batch_size - 1) // size + 2, seed)
        return tf.raw_ops.RandomIndexShuffle(
            index=number % size,
            seed=tf.gather(keys, epoch - epoch[0]),
            max_index=tf.constant(size - 1, tf.int64),
            rounds=_SHUFFLE_ROUNDS,
        )

    return tf.data.Dataset.counter().map(rows)


def _epoch_keys(first: tf.Tensor, num: int, seed: int) -> tf.Tensor:
    """Return the keys of the orders of epochs first..first+num-1, int64 `[num, 3]`, 0..2**32-1.

    RandomIndexShuffle keeps only the low bits of its seed, 8 of each number for up to 65,536
    examples. Given (seed, epoch) itself it would repeat after 256 epochs, and the orders of epochs
    in a row would be related. So its seed is drawn: of one Philox stream, one block an epoch.
    """
    key, counter = tf.raw_ops.StatelessRandomGetKeyCounter(seed=[seed, _SHUFFLE_STREAM])
    counter += tf.stack([tf.cast(first, tf.uint64), tf.constant(0, tf.uint64)])
    blocks = tf.raw_ops.StatelessRandomUniformFullIntV2(
        shape=[num, 4], key=key, counter=counter, alg=_PHILOX, dtype=tf.uint32
    )
    return tf.cast(blocks[:, :3], tf.int64)


def prefetched(batches: tf.data.Dataset) -> tf.data.Dataset:
    """Prepare the next batches while one is used.

    Nothing here is left to TensorFlow's autotuning, and its thread sleeps ever longer, up to a
    minute: whoever drops an iterator waits for it (measured: 14 to 40 s at the end of a run).
    """
    options = tf.data.Options()
    options.autotune.enabled = False
    return batches.prefetch(_PREFETCH_BATCHES).with_options(options)


def digest(*arrays: np.ndarray) -> str:
    """Return the sha256 of the types, shapes and values of arrays, in 64 digits."""
    found = hashlib.sha256()
    for array in arrays:
        found.update(f"{array.dtype.name}{list(array.shape)};".encode())
        found.update(np.ascontiguousarray(array).reshape(-1).view(np.uint8))
    return found.hexdigest()


def _example(image: tf.Tensor, label: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
    if image.dtype.is_floating:
        image = tf.cast(image, tf.float32)
    return image, tf.reshape(tf.cast(label, tf.int32), [])


def _padded(images: tf.Tensor, labels: tf.Tensor, batch_size: int) -> tuple[tf.Tensor, ...]:
    """Fill a batch up with zeros; return it with its weights."""
    num = tf.shape(labels)[0]

    def fill(part):
        rest = [[0, batch_size - num]] + [[0, 0]] * (part.shape.rank - 1)
        return tf.ensure_shape(tf.pad(part, rest), [batch_size, *part.shape[1:]])

    return fill(images), fill(labels), fill(tf.ones([num], tf.float32))
