"""Caches a training set in the memory of the towers' GPUs: the program sends row numbers only.

    cache = cache_on_devices(split, ["/gpu:0", "/gpu:1"])   # None: it is too large, or no array
    for rows, draws in cache.train_batches(128, seed=1): ...
    example = cache.example(rows)                           # as from `split.train_batches`

Each GPU holds the whole set, since any tower may get any example.
"""

from collections.abc import Sequence

import tensorflow as tf

from towers import tf_internals
from towers.builder.device_names import HOST, is_gpu, machine_of
from towers.data.pipeline import ArraySplit, Split, Structure
from towers.devices import memory

_SHARE = 0.25  # of a device's free memory
_STORED_DTYPE = {tf.int32: tf.int64}  # else as it is: TensorFlow cannot gather int32 on a GPU


class DeviceResidentBatch:
    """A batch argument whose examples are on the towers' devices: each tower gathers its rows.

        stored = [on_gpu_0, on_gpu_1]  # a tf.Variable for each tower, of all examples
        builder.map(fn, DeviceResidentBatch(stored, rows))  # rows: int64 [B], on the host

    As a tensor it is the whole batch, gathered on the first tower's device.
    """

    def __init__(self, stored: Sequence[tf.Variable], rows: tf.Tensor, dtype: tf.DType):
        """Set the stored examples and the rows of the batch, see `DeviceResidentBatch`."""
        self.stored, self.rows, self.dtype = list(stored), rows, tf.as_dtype(dtype)
        self.shape = rows.shape.concatenate(stored[0].shape[1:])

    def of_tower(self, tower: int, part: slice) -> tf.Tensor:
        """Return a part of the batch, gathered on a tower's device.

        Args:
            tower: number of the tower.
            part: places of its examples in the batch.
        """
        with tf.device(HOST):
            rows = self.rows[part]
        with tf.device(self.stored[tower].device):
            return tf.cast(tf.gather(self.stored[tower], rows), self.dtype)


tf.register_tensor_conversion_function(
    DeviceResidentBatch,
    lambda batch, dtype=None, **_: tf.cast(batch.of_tower(0, slice(None)), dtype or batch.dtype),
)


class DeviceCache:
    """A split in the memory of the towers' devices; it uses `bytes` of each."""

    def __init__(self, split: ArraySplit, homes: Sequence[str]):
        """Copy a split to the towers' devices.

        Args:
            split: the examples.
            homes: a device for each tower; towers may share one.
        """
        self.bytes = num_bytes(split)
        self.train_batches = split.train_rows
        arrays = tf.nest.flatten(split.arrays())
        copies = {home: [_copy(array, home) for array in arrays] for home in dict.fromkeys(homes)}
        self._stored = list(zip(*(copies[home] for home in homes), strict=True))
        self._split = split

    def __str__(self) -> str:
        """Return the line that the start of a run prints."""
        return f"{self.bytes / 2**20:.1f} MiB on each GPU; the host sends only row numbers"

    def example(self, rows: tf.Tensor) -> Structure:
        """Return a batch that a `TowerBuilder` splits without moving its examples."""
        specs = tf.nest.flatten(self._split.spec)
        leaves = [
            DeviceResidentBatch(stored, rows, spec.dtype)
            for stored, spec in zip(self._stored, specs, strict=True)
        ]
        return tf.nest.pack_sequence_as(self._split.spec, leaves)


def cache_on_devices(split: Split, names: Sequence[str]) -> DeviceCache | None:
    """Copy a split to the devices of the towers.

    Args:
        split: the training set.
        names: device of each tower.

    Returns:
        None if it is not an array, or has texts. None if a tower is on a CPU, whose host has it
        already, or on another machine. None if a GPU has less than four times its size of free
        memory.
    """
    if not isinstance(split, ArraySplit):
        return None
    if any(spec.dtype == tf.string for spec in tf.nest.flatten(split.spec)):
        return None
    size, limits = num_bytes(split), tf_internals.device_memory_bytes()
    for name in names:
        if machine_of(name) or not is_gpu(name) or size > _SHARE * _free(name, limits):
            return None
    return DeviceCache(split, names)


def num_bytes(split: ArraySplit) -> int:
    """Return the bytes of a split on a device."""
    row_bytes = 0
    for leaf in tf.nest.flatten(split.spec):
        row_bytes += leaf.shape.num_elements() * _stored_dtype(leaf.dtype).size
    return split.size * row_bytes


def _free(name: str, limits: dict[str, int]) -> float:
    limit = limits.get(name.lower(), 0)
    used = memory.of_device(name) if "gpu" in name.lower() else None
    return limit - (used[0] * memory.MIB if used else 0)


def _stored_dtype(dtype: tf.DType) -> tf.DType:
    return _STORED_DTYPE.get(dtype, dtype)


def _copy(array: tf.Tensor, home: str) -> tf.Variable:
    with tf.device(home):
        return tf.Variable(tf.cast(array, _stored_dtype(array.dtype)), trainable=False)
