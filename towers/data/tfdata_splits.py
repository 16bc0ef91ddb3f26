"""Splits of the user's own pipelines, of single examples or of batches."""

import copy

import keras
import numpy as np
import tensorflow as tf

from towers.data import arrays
from towers.data.pipeline import (
    Split,
    Structure,
    check_labels,
    epoch_keys,
    held_out_rows,
    num_rows,
    shuffled_rows,
    spec_of,
    stored_spec,
)
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

    def largest_label(self, name: str) -> tuple[int, str]:
        """See `ArraySplit.largest_label`: all examples are read, and counted."""
        labels = self._given.map(lambda *example: tf.reshape(tf.cast(example[1], tf.int64), []))
        batches = labels.batch(_COUNT_BATCH).as_numpy_iterator()
        values = np.concatenate([np.zeros(0, np.int64), *batches])
        if len(values) != self.size:
            raise InputError(f"{name} dataset has {len(values)} examples but size is {self.size}")
        wrong = np.flatnonzero((values < 0) | (values > arrays.MAX_LABEL))
        row = int(wrong[0]) if wrong.size else int(np.argmax(values))
        where = f"{name} dataset: example {row} (counted from 0)"
        if wrong.size:
            raise InputError(f"{where} has label {values[row]}; {arrays.CLASSES_ARE}")
        return int(values[row]), where

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
                outside = f"which is outside of 0..{num_classes - 1}"
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


class BatchSplit(Split):
    """A split of a user's `keras.utils.PyDataset`, whose batches are read by number.

    The batches are shuffled in each epoch; the order inside a batch is the user's, and
    `on_epoch_end`, which may shuffle, is not called. A resumed run reads no earlier batches, and is
    exact if a number always gives the same batch. Batches are cut and joined to the run's batch
    size.
    """

    def __init__(self, name: str, dataset: keras.utils.PyDataset):
        """Wrap batches; the first and the last one are read.

        Args:
            name: for messages.
            dataset: of batches that are alike, but the last may be shorter.

        Raises:
            InputError: there is no batch, or no end of them, or one that is read is invalid.
        """
        self._name, self._dataset, self._num_classes = name, dataset, 0
        num = dataset.num_batches
        if num is None or num < 1:
            wrong = "is endless" if num is None else f"has {num} batches"
            raise InputError(f"{name} {type(dataset).__name__} {wrong}; return 1 batch or more")
        first, last = self._example(0), self._example(num - 1)
        self.spec = spec_of(first)
        self._numbers, self._sizes = np.arange(num), np.full(num, num_rows(first))
        self._sizes[-1] = min(num_rows(first), num_rows(last))
        self.size = int(self._sizes.sum())
        self._check(num - 1, last)

    def largest_label(self, name: str) -> tuple[int, str]:
        """See `ArraySplit.largest_label`: all batches are read."""
        largest = [int(self._read(number)[1].max()) for number in self._numbers.tolist()]
        number = int(np.argmax(largest))
        return largest[number], f"{name} batch {number}"

    def checked(self, name: str, num_classes: int) -> "BatchSplit":
        """See `ArraySplit.checked`: as batches are read."""
        split = copy.copy(self)
        split._num_classes = num_classes
        return split

    def held_out(self, fraction: float) -> tuple[Split, Split]:
        """See `Split.held_out`: whole batches are held out."""
        parts = []
        for rows in held_out_rows(len(self._numbers), fraction):
            part = copy.copy(self)
            part._numbers = self._numbers[rows]
            part.size = int(self._sizes[part._numbers].sum())
            parts.append(part)
        return tuple(parts)

    def _batches_in_order(self, batch_size: int) -> tf.data.Dataset:
        return self._batches(tf.data.Dataset.range(len(self._numbers))).rebatch(batch_size)

    def _shuffled_batches(self, batch_size: int, seed: int, examples: int) -> tf.data.Dataset:
        num = len(self._numbers)
        epoch, position = divmod(examples, self.size)
        with tf.init_scope():
            order = shuffled_rows(num, num, seed, epoch * num).take(1).get_single_element().numpy()
        ends = np.cumsum(self._sizes[self._numbers[order]])
        first = int(np.searchsorted(ends, position, side="right"))
        skipped = position - (ends[first - 1] if first else 0)
        batches = self._batches(shuffled_rows(1, num, seed, epoch * num + first).unbatch())
        return batches.unbatch().skip(skipped).batch(batch_size, drop_remainder=True)

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

        threads = max(1, self._dataset.workers)
        return places.map(read, num_parallel_calls=threads, deterministic=True)

    def _read(self, number: int) -> Structure:
        example = self._example(number)
        self._check(number, example)
        check_labels(f"{self._name} batch {number}", example, self._num_classes)
        return example

    def _example(self, number: int) -> Structure:
        where = f"{self._name} batch {number}"
        try:
            batch = self._dataset[number]
        except BaseException as error:
            error.add_note(f"in {where}")
            raise
        parts = batch if isinstance(batch, tuple | list) and len(batch) in (1, 2, 3) else (batch,)
        return arrays.as_arrays(where, parts)

    def _check(self, number: int, example: Structure) -> None:
        spec, size = spec_of(example), num_rows(example)
        if spec != self.spec:
            raise InputError(
                f"{self._name} batch {number} is of {arrays.format_spec(spec)}, but batch 0 of "
                f"{arrays.format_spec(self.spec)}; make them alike"
            )
        if size != self._sizes[number]:
            raise InputError(
                f"{self._name} batch {number} has {size} examples, but {self._sizes[number]} are "
                "expected; make all batches as long as the first, the last one as long or shorter"
            )
