"""A training set in the memory of GPUs: the host sends them numbers of rows, and no examples.

    stored = on_gpus.store(split, ["/gpu:0", "/gpu:1"])     # None: it is too large, or no array
    for rows, draws in stored.train_batches(128, seed=1): ...
    example = stored.example(rows)                          # as `split.train_batches` has it

Each GPU holds all of it: any example may fall to any tower.
"""

from collections.abc import Sequence

import tensorflow as tf

from towers import tf_private
from towers.builder.kinds import are_gpus
from towers.builder.splitting import StoredRows
from towers.data.pipeline import ArraySplit, Split, Structure
from towers.devices import memory

_SHARE = 0.25  # of a GPU's memory that is free
# TensorFlow takes rows on a GPU of all numbers but these.
_KEPT_AS = {tf.int32: tf.int64}


class OnGpus:
    """A split on the devices of towers; `bytes` is what it takes of each."""

    def __init__(self, split: ArraySplit, names: Sequence[str]):
        """Copy the split to the devices with these names, one for each tower."""
        self.bytes = size_of(split)
        self.train_batches = split.train_rows
        copies = {name: _copy(split.arrays(), name) for name in dict.fromkeys(names)}
        of_arrays = zip(*(copies[name] for name in names), strict=True)
        self._stored = list(zip(of_arrays, tf.nest.flatten(split.spec), strict=True))
        self._spec = split.spec

    def example(self, rows: tf.Tensor) -> Structure:
        """Return what stands for the examples of a batch, to be handed to a `TowerBuilder`."""
        leaves = [StoredRows(stored, rows, spec.dtype) for stored, spec in self._stored]
        return tf.nest.pack_sequence_as(self._spec, leaves)


def store(split: Split, names: Sequence[str]) -> OnGpus | None:
    """Copy a split to the towers' GPUs; None if they are none, or it does not fit there."""
    if not isinstance(split, ArraySplit) or not are_gpus(names):
        return None
    if any(spec.dtype == tf.string for spec in tf.nest.flatten(split.spec)):
        return None
    limits = tf_private.device_memory_bytes()
    if any(size_of(split) > _SHARE * _free(name, limits) for name in names):
        return None
    return OnGpus(split, names)


def size_of(split: ArraySplit) -> int:
    """Return how many bytes a GPU needs to hold a split."""
    leaves = tf.nest.flatten(split.spec)
    sizes = [spec.shape.num_elements() * _kept_as(spec.dtype).size for spec in leaves]
    return split.size * sum(sizes)


def _free(name: str, limits: dict[str, int]) -> float:
    """Return how many bytes are free on a device of this process, 0 of others."""
    limit = limits.get(name.lower(), 0)
    used = memory.of_device(name) if "gpu" in name.lower() else None
    return limit - (used[0] * memory.MIB if used else 0)


def _kept_as(dtype: tf.DType) -> tf.DType:
    return _KEPT_AS.get(dtype, dtype)


def _copy(arrays: Structure, name: str) -> list[tf.Variable]:
    with tf.device(name):
        return [
            tf.Variable(tf.cast(array, _kept_as(array.dtype)), trainable=False)
            for array in tf.nest.flatten(arrays)
        ]
