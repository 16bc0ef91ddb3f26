"""All-sums between the towers of one step, on TensorFlow's own collective ops.

A collective (NCCL on GPUs, a ring on CPUs) waits for every member, so it works only where towers
run side by side: in a compiled step, each tower on a device of its own.
"""

import functools
import itertools
from collections.abc import Sequence

import tensorflow as tf

TIMEOUT_SECONDS = 300.0  # of a member that does not come, as when its tower has failed

# Each collective costs a round of meetings, so small tensors go together; but a first bucket that
# is under way while the next is computed costs nothing. 4 MiB is a few milliseconds of computing.
BUCKET_BYTES = 4 * 2**20

# Keys are of the whole process: far from those of tf.distribute, which begin at 1. A collision
# would end all collectives for good: TensorFlow asks to restart the program.
_instance_keys = itertools.count(1_000_000)
_FIRST_GROUP_KEY = 1_000


def all_sum(values: Sequence[Sequence[tf.Tensor]], devices: Sequence[str]) -> list[list[tf.Tensor]]:
    """Return for each tower the sums over all towers, on its own device.

    The last tensors of each tower's list are summed first: gradients come in that order.

    Raises:
        ValueError: two towers share a device, or the function is not compiled.
    """
    if tf.executing_eagerly():
        raise ValueError(
            "towers that run one after the other cannot sum together: make a tf.function of the "
            "step, or gather on one device"
        )
    if len(set(devices)) < len(devices):
        raise ValueError(f"towers sum over {devices}, but each needs a device of its own")
    sums: list[list] = [[None] * len(values[0]) for _ in devices]
    for bucket in buckets(values[0]):
        key = next(_instance_keys)
        for device, own, result in zip(devices, values, sums, strict=True):
            with tf.device(device):
                packed = _pack([own[i] for i in bucket])
                total = _reduce(packed, tuple(devices), device, key)
                parts = _unpack(total, [own[i] for i in bucket])
            for i, part in zip(bucket, parts, strict=True):
                result[i] = part
    return sums


def buckets(values: Sequence[tf.Tensor]) -> list[list[int]]:
    """Return the places of the tensors that are summed together, the last tensor's bucket first.

    A bucket holds tensors of one type, of at most BUCKET_BYTES unless it is one tensor.
    """
    found: list[list[int]] = []
    size = 0
    for i in reversed(range(len(values))):
        value = values[i]
        num_bytes = value.shape.num_elements() * value.dtype.size
        fits = found and size + num_bytes <= BUCKET_BYTES
        if not fits or values[found[-1][0]].dtype != value.dtype:
            found.append([])
            size = 0
        found[-1].append(i)
        size += num_bytes
    return found


def _pack(values: Sequence[tf.Tensor]) -> tf.Tensor:
    flat = [tf.reshape(value, [-1]) for value in values]
    return tf.concat(flat, axis=0) if len(flat) > 1 else flat[0]


def _unpack(packed: tf.Tensor, like: Sequence[tf.Tensor]) -> list[tf.Tensor]:
    sizes = [value.shape.num_elements() for value in like]
    parts = tf.split(packed, sizes) if len(sizes) > 1 else [packed]
    return [tf.reshape(part, value.shape) for part, value in zip(parts, like, strict=True)]


def _reduce(value: tf.Tensor, devices: tuple[str, ...], device: str, key: int) -> tf.Tensor:
    """Sum a tensor over the towers, as the member on `device`."""
    return tf.raw_ops.CollectiveReduceV2(
        input=value,
        group_size=len(devices),
        group_key=_group_key(devices),
        instance_key=key,
        ordering_token=[_ordering_token(device).handle],
        merge_op="Add",
        final_op="Id",
        timeout_seconds=TIMEOUT_SECONDS,
    )


@functools.cache
def _group_key(devices: tuple[str, ...]) -> int:
    """Return the key of a set of devices."""
    return _FIRST_GROUP_KEY + _group_key.cache_info().currsize


@functools.cache
def _ordering_token(device: str) -> tf.Variable:
    """Return a variable by which the collectives of a device, and only those, are ordered.

    Automatic control dependencies would order those of different devices, too: each would then wait
    for one that waits for it.
    """
    with tf.init_scope(), tf.device(device):
        return tf.Variable(0.0, trainable=False, name="ordering_token")
