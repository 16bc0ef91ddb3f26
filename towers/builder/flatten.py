"""Many values as one flat tensor, and back.

A GPU is slow at beginning an op, a collective at its meeting and a transfer at its wait: what is
done to many small values alike is done once to all of one type.
"""

import itertools
from collections.abc import Sequence
from typing import Any

import tensorflow as tf

# An op on so many bytes takes a GPU longer than to begin it; copies of them would cost memory.
LARGE_BYTES = 4 * 2**20
# Copying so many bytes into one tensor and out of it costs a CPU less than one more message.
SMALL_BYTES = 2**16


def is_large(variable: Any) -> bool:
    """Return whether packing a variable would cost more than it saves."""
    return _num_bytes(variable) > LARGE_BYTES


def is_small(value: Any) -> bool:
    """Return whether a variable or tensor is better sent to another machine with others."""
    return value.shape.is_fully_defined() and _num_bytes(value) <= SMALL_BYTES


def _num_bytes(value: Any) -> int:
    return value.shape.num_elements() * tf.as_dtype(value.dtype).size


def dense(gradient: Any, variable: Any) -> Any:
    """Make a sparse gradient dense, unless its variable is large.

    Not for a Keras optimizer that is called by itself: it squares each row, not their sum. To find
    which rows there are would make the host wait for the GPU, and collectives do not sum rows.
    """
    if not isinstance(gradient, tf.IndexedSlices) or is_large(variable):
        return gradient
    return tf.math.unsorted_segment_sum(gradient.values, gradient.indices, variable.shape[0])


def pack(values: Sequence[tf.Tensor]) -> tf.Tensor:
    """Concatenate the elements of tensors of one type into one tensor `[total]`."""
    flat = [tf.reshape(value, [-1]) for value in values]
    return tf.concat(flat, axis=0) if len(flat) > 1 else flat[0]


def unpack(packed: tf.Tensor, like: Sequence[Any]) -> list[tf.Tensor]:
    """Split what `pack` made into tensors of the shapes of `like`."""
    sizes = [value.shape.num_elements() for value in like]
    if packed.dtype.is_floating:
        parts = tf.split(packed, sizes) if len(sizes) > 1 else [packed]
    else:  # of other types a GPU has no split
        stops = itertools.accumulate(sizes)
        parts = [packed[stop - size : stop] for stop, size in zip(stops, sizes, strict=True)]
    return [tf.reshape(part, value.shape) for part, value in zip(parts, like, strict=True)]
