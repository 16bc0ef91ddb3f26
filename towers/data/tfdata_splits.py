"""Splits that are read from the user's own pipelines, of single examples or of batches."""

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
_TEXT_BYTES = 4096  # a text's weight in it


class DatasetSplit(Split):
    """A split that is read from a `tf.data.Dataset` of the user's.

    It is shuffled with a buffer of at most 256 MiB of x, anew in each epoch. A run that is resumed
    reads and drops what came before its place in the epoch, and goes on exactly if the dataset
    gives the same examples in the same order each time that it is read. A dataset that gives more
    or fewer examples than its size stops the reading with a `tf.errors.FailedPreconditionError`.
    """

    def __init__(self, dataset: tf.data.Dataset, size: int):
        """Wrap a dataset.

        Args:
            dataset: finite, of single examples (x,), (x, y) or (x, y, sample_weight), of tensors of
                known shapes. They are given out as `stored_spec`.
            size: how many examples it gives, 1 or more.
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
            own = numbered.filter(lambda row, _: is_held_out(row, self.size, num_held) == held)
            return DatasetSplit(own.map(lambda _, example: example), size)

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
    """A split that is read in batches of the user's, by their numbers.

    The batches are shuffled anew in each epoch; the order inside of one is the user's. A run that
    is resumed reads nothing of what came before, and goes on exactly if a number always gives the
    same batch. What is read is cut and joined to the run's own batch size.
    """

    def __init__(
        self,
        read: Callable[[int], Structure],
        sizes: Sequence[int],
        spec: Structure,
        num_threads: int = 1,
    ):
        """Keep the sizes; read nothing.

        Args:
            read: returns the batch with a number, arrays of rows as `spec` says.
            sizes: number of examples of each batch, 1 or more.
            spec: of one example, see `Split.spec`.
            num_threads: how many batches may be read at once.
        """
        self.spec, self._read, self._num_threads = spec, read, num_threads
        self._sizes, self._numbers = np.asarray(sizes), np.arange(len(sizes))
        self.size = int(self._sizes.sum())

    def held_out(self, fraction: float) -> tuple[Split, Split]:
        """See `Split.held_out`: whole batches are."""
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
