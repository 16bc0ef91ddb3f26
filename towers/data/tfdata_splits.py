"""Splits of the user's own pipelines, of single examples."""

import numpy as np
import tensorflow as tf

from towers.data import arrays
from towers.data.pipeline import Split, epoch_keys, held_out_rows, stored_spec
from towers.errors import InputError

_COUNT_BATCH = 1024
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
        self.size, self.spec, self._given = size, stored_spec(dataset.element_spec), dataset

        def keep(*example):
            return tf.nest.map_structure(
                lambda tensor, spec: tf.reshape(tf.cast(tensor, spec.dtype), spec.shape),
                example,
                self.spec,
            )

        self._dataset = dataset.map(keep).apply(tf.data.experimental.assert_cardinality(size))

    def label_range(self, name: str) -> tuple[int, int]:
        """See `ArraySplit.label_range`: all examples are read, and counted."""
        labels = self._given.map(lambda *example: tf.reshape(tf.cast(example[1], tf.int64), []))
        batches = labels.batch(_COUNT_BATCH).as_numpy_iterator()
        values = np.concatenate([np.zeros(0, np.int64), *batches])
        if len(values) != self.size:
            raise InputError(f"{name} dataset has {len(values)} examples, but size is {self.size}")
        wrong = np.flatnonzero((values < 0) | (values > arrays.MAX_LABEL))
        if wrong.size:
            raise InputError(
                f"{name} dataset: example {wrong[0]} (counted from 0) has label "
                f"{values[wrong[0]]}; {arrays.CLASSES_ARE}"
            )
        return int(values.min()), int(values.max())

    def checked(self, name: str, num_classes: int) -> "DatasetSplit":
        """See `ArraySplit.checked`: as examples are read, also for a NaN or an infinity."""

        def check(number, example):
            where = f"{name} dataset: example", number, "(counted from 0) has"
            checks = []
            for tensor in tf.nest.flatten(example):
                if tensor.dtype.is_floating:
                    finite = tf.reduce_all(tf.math.is_finite(tensor))
                    checks.append(tf.debugging.Assert(finite, [*where, "a NaN or an infinity"]))
            if num_classes:
                label = tf.cast(example[1], tf.int64)
                good = tf.reduce_all((label >= 0) & (label < num_classes))
                outside = f"which is not in 0..{num_classes - 1}"
                checks.append(tf.debugging.Assert(good, [*where, "label", label, outside]))
            with tf.control_dependencies(checks):
                return tf.nest.map_structure(tf.identity, example)

        return DatasetSplit(self._given.enumerate().map(check), self.size)

    def held_out(self, fraction: float) -> tuple[Split, Split]:
        """See `Split.held_out`: both parts read the whole dataset."""
        _, held_rows = held_out_rows(self.size, fraction)
        with tf.device("/cpu:0"):
            is_held_out = tf.constant(np.isin(np.arange(self.size), held_rows))

        def part(held, size):
            members = self._dataset.enumerate().filter(lambda row, _: is_held_out[row] == held)
            return DatasetSplit(members.map(lambda _, example: example), size)

        return part(False, self.size - len(held_rows)), part(True, len(held_rows))

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
