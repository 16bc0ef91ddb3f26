"""Splits of the user's own pipelines, of single examples or of batches."""

import copy
from collections.abc import Callable, Sequence

import numpy as np
import tensorflow as tf

from towers.data.pipeline import (
    Split,
    Structure,
    epoch_keys,
    held_out_rows,
    is_held_out,
    num_held_out,
    shuffled_rows,
    stored_spec,
)

_SHUFFLE_BUFFER_BYTES = 256 * 2**20
_TEXT_BYTES = 4096  # counted for each text in it


class DatasetSplit(Split):
    """A split of a user's `tf.data.Dataset`.

    It is shuffled in each epoch, with a buffer of at most 256 MiB of x. A resumed run reads and
    drops the examples before its place in the epoch; it is exact if the dataset always yields the
    same examples in the same order. Another number of examples than `size` raises a
    `tf.errors.FailedPreconditionError`.
    """

    def __init__(self, dataset: tf.data.Dataset, size: int):
        """Wrap a dataset.

        Args:
            dataset: finite, of single examples (x,), (x, y) or (x, y, sample_weight), of tensors of
                known shapes, which are converted to `stored_spec`.
            size: its number of examples, 1 or more.
        """
        self.size, self.spec = size, stored_spec(dataset.element_spec)

        def keep(*example):
            return tf.nest.map_structure(
                lambda tensor, spec: tf.reshape(tf.cast(tensor, spec.dtype), spec.shape),
                example,
                self.spec,
            )

        self._dataset = dataset.map(keep).apply(tf.data.experimental.assert_cardinality(size))

    def held_out(self, fraction: float) -> tuple[Split, Split]:
        """See `Split.held_out`: both parts read the whole dataset."""
        num_held, numbered = num_held_out(self.size, fraction), self._dataset.enumerate()

        def part(held, size):
            members = numbered.filter(lambda row, _: is_held_out(row, self.size, num_held) == held)
            return DatasetSplit(members.map(lambda _, example: example), size)

        return part(False, self.size - num_held), part(True, num_held)

    def _shuffled_batches(self, batch_size: int, seed: int, examples: int) -> tf.data.Dataset:
        epoch, position = divmod(examples, self.size)
        epochs = tf.data.Dataset.counter(epoch).flat_map(lambda epoch: self._shuffled(epoch, seed))
        return epochs.skip(position).batch(batch_size, drop_remainder=True)

    def _batches_in_order(self, batch_size: int) -> tf.data.Dataset:
        return self._dataset.batch(batch_size)

    def _shuffled(self, epoch: tf.Tensor, seed: int) -> tf.data.Dataset:
        parts = tf.nest.flatten(self.spec)
        x_bytes = sum(
            part.shape.num_elements() * (part.dtype.size or _TEXT_BYTES)
            for part in tf.nest.flatten(self.spec[0])
        )
        key = epoch_keys(epoch, 1, seed)[0]
        # Dataset.shuffle would mix in tf.random.set_seed: the order would depend on the program.
        variant = tf.raw_ops.ShuffleDataset(
            input_dataset=tf.data.experimental.to_variant(self._dataset),
            buffer_size=max(1, min(self.size, _SHUFFLE_BUFFER_BYTES // max(1, x_bytes))),
            seed=key[0],
            seed2=key[1] + 1,  # both 0 would mean: another order each time
            reshuffle_each_iteration=False,
            output_types=[part.dtype for part in parts],
            output_shapes=[part.shape for part in parts],
        )
        return tf.data.experimental.from_variant(variant, self.spec)


class BatchSplit(Split):
    """A split of a user's batches, which are read by number.

    The batches are shuffled in each epoch; the order inside a batch is the user's. A resumed run
    reads no earlier batches, and is exact if a number always gives the same batch. Batches are cut
    and joined to the run's batch size.
    """

    def __init__(
        self,
        read: Callable[[int], Structure],
        sizes: Sequence[int],
        spec: Structure,
        num_threads: int = 1,
    ):
        """Wrap batches.

        Args:
            read: maps a batch's number to its arrays, with a row of `spec` for each example.
            sizes: number of examples of each batch, 1 or more.
            spec: of one example, see `Split.spec`.
            num_threads: number of batches that are read in parallel.
        """
        self.spec, self._read, self._num_threads = spec, read, num_threads
        self._sizes, self._numbers = np.asarray(sizes), np.arange(len(sizes))
        self.size = int(self._sizes.sum())

    def held_out(self, fraction: float) -> tuple[Split, Split]:
        """See `Split.held_out`: whole batches are held out."""
        parts = []
        for rows in held_out_rows(len(self._numbers), fraction):
            part = copy.copy(self)
            part._numbers, part._sizes = self._numbers[rows], self._sizes[rows]
            part.size = int(part._sizes.sum())
            parts.append(part)
        return tuple(parts)

    def _batches_in_order(self, batch_size: int) -> tf.data.Dataset:
        return self._batches(tf.data.Dataset.range(len(self._numbers))).rebatch(batch_size)

    def _shuffled_batches(self, batch_size: int, seed: int, examples: int) -> tf.data.Dataset:
        num = len(self._numbers)
        epoch, position = divmod(examples, self.size)
        order = next(iter(shuffled_rows(num, num, seed, epoch * num))).numpy()
        ends = np.cumsum(self._sizes[order])
        first = int(np.searchsorted(ends, position, side="right"))
        skipped = position - int(ends[first] - self._sizes[order[first]])
        places = shuffled_rows(1, num, seed, epoch * num + first).map(lambda place: place[0])

        def cut(index, example):
            start = tf.where(index == 0, skipped, 0)
            return tf.nest.map_structure(lambda part: part[start:], example)

        batches = self._batches(places).enumerate().map(cut)
        return batches.rebatch(batch_size, drop_remainder=True)

    def _batches(self, places: tf.data.Dataset) -> tf.data.Dataset:
        numbers, specs = tf.constant(self._numbers), tf.nest.flatten(self.spec)

        def read(place):
            parts = tf.numpy_function(
                lambda number: tf.nest.flatten(self._read(int(number))),
                [tf.gather(numbers, place)],
                [spec.dtype for spec in specs],
                stateful=False,
            )
            shaped = [
                tf.ensure_shape(part, [None, *spec.shape])
                for part, spec in zip(parts, specs, strict=True)
            ]
            return tf.nest.pack_sequence_as(self.spec, shaped)

        return places.map(read, num_parallel_calls=self._num_threads, deterministic=True)
