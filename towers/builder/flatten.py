"""Packs many values into one flat tensor, and back.

An op on a GPU, a collective and a transfer all have a fixed cost: many small values of one type are
processed as one.
"""

import itertools
from collections.abc import Sequence
from typing import Any

import tensorflow as tf

# Above this an op's work takes a GPU longer than its launch, and a copy costs memory.
LARGE_BYTES = 4 * 2**20


def is_large(variable: Any) -> bool:
    """Return whether packing a variable would cost more than it saves."""
    return _num_bytes(variable) > LARGE_BYTES


def _num_bytes(value: Any) -> int:
    return value.shape.num_elements() * tf.as_dtype(value.dtype).size


def pack(values: Sequence[tf.Tensor]) -> tf.Tensor:
    """Concatenate the elements of tensors of one type into one tensor `[total]`."""
    flat = [tf.reshape(value, [-1]) for value in values]
    return tf.concat(flat, axis=0) if len(flat) > 1 else flat[0]


def unpack(packed: tf.Tensor, like: Sequence[Any]) -> list[tf.Tensor]:
    """Split a packed tensor again.

    Args:
        packed: `[total]`, from `pack`.
        like: tensors or variables of the shapes of the result, in the order of packing.
    """
    sizes = [value.shape.num_elements() for value in like]
    if packed.dtype.is_floating:
        parts = tf.split(packed, sizes) if len(sizes) > 1 else [packed]
    else:  # of other types a GPU has no split
        stops = itertools.accumulate(sizes)
        parts = [packed[stop - size : stop] for stop, size in zip(stops, sizes, strict=True)]
    return [tf.reshape(part, value.shape) for part, value in zip(parts, like, strict=True)]
