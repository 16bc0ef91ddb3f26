"""Packs many values into one flat tensor, and back.

An op on a GPU, a collective and a transfer all have a fixed cost: many small values of one type are
processed as one.
"""

import itertools
from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

# Above this an op's work takes a GPU longer than its launch, and a copy costs memory.
LARGE_BYTES = 4 * 2**20
# Most that is packed into one tensor. It takes a GPU about as long as the launch, too, and longer
# ones would save few launches: their copies are what a step needs of memory beside its variables.
GROUP_BYTES = 5 * 2**20


def num_bytes(value: Any) -> int:
    """Return the bytes of a tensor or variable."""
    return value.shape.num_elements() * tf.as_dtype(value.dtype).size


def grouped(
    items: Sequence[Any], kind: Callable, size: Callable[[Any], int] = lambda _: 0
) -> list[list[Any]]:
    """Return items in groups of one kind, of at most GROUP_BYTES, in order of their first.

    Args:
        items: of any type.
        kind: returns an item's key; an item without one (None) is a group of its own.
        size: returns an item's bytes; one of more than LARGE_BYTES is a group of its own, too.
    """
    groups: list[list[Any]] = []
    last: dict[Any, tuple[list[Any], int]] = {}  # of each kind, the last group and its bytes
    for item in items:
        key, num = kind(item), size(item)
        group, total = last.get(key, ([], GROUP_BYTES + 1))
        if key is None or num > LARGE_BYTES or total + num > GROUP_BYTES:
            group, total = [], 0
            groups.append(group)
        group.append(item)
        if key is not None and num <= LARGE_BYTES:
            last[key] = group, total + num
    return groups


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
