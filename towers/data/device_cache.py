"""Caches a training set in the memory of the towers' devices: the program sends row numbers only.

    cache = cache_on_devices(split, ["/gpu:0", "/gpu:1"])   # None: it is too large, or no array
    for rows, draws in cache.train_batches(128, seed=1): ...
    example = cache.example(rows)                           # as from `split.train_batches`

Each GPU holds the whole set, since any tower may get any example. Another machine holds it once for
all of its towers, in the host's memory if its GPUs have not enough.
"""

import functools
import re
from collections.abc import Sequence

import tensorflow as tf

from towers import tf_internals
from towers.builder.device_types import HOST, PROGRAM, are_gpus, is_gpu, machine_of
from towers.builder.sharding import DeviceResidentBatch
from towers.data.pipeline import ArraySplit, Split, Structure
from towers.devices import memory, remote

_SHARE = 0.25  # of a device's free memory
_STORED_DTYPE = {tf.int32: tf.int64}  # else as it is: TensorFlow cannot gather int32 on a GPU
_CHUNK_BYTES = 64 * 2**20  # sent at once to another machine: a message must have less than 2 GiB


class DeviceCache:
    """A split in the memory of the towers' devices or machines; it uses `bytes` of each."""

    def __init__(self, split: ArraySplit, homes: Sequence[str]):
        """Copy a split to the towers' devices.

        Args:
            split: the examples.
            homes: a device for each tower; towers may share one.
        """
        self.bytes, self.homes = num_bytes(split), list(homes)
        self.train_batches = split.train_rows
        arrays = tf.nest.flatten(split.arrays())
        copies = {home: [_copy(array, home) for array in arrays] for home in dict.fromkeys(homes)}
        self._stored = list(zip(*(copies[home] for home in homes), strict=True))
        self._split = split

    def __str__(self) -> str:
        """Return the line that the start of a run prints."""
        size = f"{self.bytes / 2**20:.1f} MiB"
        if are_gpus(self.homes):
            return f"{size} on each GPU: the host sends the numbers of rows"
        return f"sent to the {remote.MACHINES} once, {size} each: then the numbers of rows"

    def example(self, rows: tf.Tensor) -> Structure:
        """Return a batch that a `TowerBuilder` splits without moving its examples."""
        specs, whole = tf.nest.flatten(self._split.spec), [None] * len(self._stored)
        if not are_gpus(self.homes):  # this process has the batch, too
            with tf.device(HOST):
                whole = tf.nest.flatten(self._split.batch(rows))
        leaves = [
            DeviceResidentBatch(stored, rows, spec.dtype, here)
            for stored, spec, here in zip(self._stored, specs, whole, strict=True)
        ]
        return tf.nest.pack_sequence_as(self._split.spec, leaves)


def cache_on_devices(split: Split, names: Sequence[str]) -> DeviceCache | None:
    """Copy a split to the devices of the towers.

    Args:
        split: the training set.
        names: device of each tower.

    Returns:
        None if it is no array or has texts, if a tower is on a CPU of this machine, which has it
        already, or if a GPU here, or a machine, has less than four times its size of free memory.
    """
    if not isinstance(split, ArraySplit):
        return None
    if any(spec.dtype == tf.string for spec in tf.nest.flatten(split.spec)):
        return None
    size, limits = num_bytes(split), tf_internals.device_memory_bytes()
    homes, free_on_host = [], functools.cache(_free_on_host)
    for name in names:
        machine = machine_of(name)
        if is_gpu(name) and size <= _SHARE * _free(name, limits):
            homes.append(name)
        elif machine and size <= _SHARE * free_on_host(machine):
            homes.append(f"{machine}{HOST}")
        else:
            return None
    return DeviceCache(split, homes)


def num_bytes(split: ArraySplit) -> int:
    """Return the bytes of a split on a device."""
    row_bytes = 0
    for leaf in tf.nest.flatten(split.spec):
        row_bytes += leaf.shape.num_elements() * _stored_dtype(leaf.dtype).size
    return split.size * row_bytes


def _free(name: str, limits: dict[str, int]) -> float:
    # Free bytes of a device; on another machine, all that TensorFlow may use; 0 if unknown.
    if machine_of(name):
        info = remote.device_info(name)
        return (info and info.memory_bytes) or 0
    limit = limits.get(name.lower(), 0)
    used = memory.of_device(name) if "gpu" in name.lower() else None
    return limit - (used[0] * memory.MIB if used else 0)


def _free_on_host(machine: str) -> int:
    match = re.search(r"MemAvailable:\s*(\d+)", remote.read_text(machine, "/proc/meminfo") or "")
    return int(match[1]) * 2**10 if match else 0


def _stored_dtype(dtype: tf.DType) -> tf.DType:
    return _STORED_DTYPE.get(dtype, dtype)


def _copy(array: tf.Tensor, home: str) -> tf.Variable:
    dtype = _stored_dtype(array.dtype)
    with tf.device(home):
        if not machine_of(home):
            return tf.Variable(tf.cast(array, dtype), trainable=False)
        copied = tf.Variable(tf.zeros(array.shape, dtype), trainable=False)
    row_bytes = array.shape[1:].num_elements() * dtype.size
    num_rows = max(_CHUNK_BYTES // max(row_bytes, 1), 1)
    for start in range(0, len(array), num_rows):
        with tf.device(f"{PROGRAM}{HOST}"):  # only these rows are sent
            rows = tf.cast(array[start : start + num_rows], dtype)
        with tf.device(home):
            copied[start : start + num_rows].assign(rows)
    return copied
