"""Splits a global batch into the towers' slices."""

import contextlib
import dataclasses
import itertools
from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from towers import tf_internals
from towers.builder.device_names import HOST, is_gpu
from towers.builder.rng import BatchSlice
from towers.errors import InputError


class PerTower:
    """A batch argument that hands tower i its own value instead of a slice.

        builder.map(lambda x, scale: x * scale, tf.ones([3, 2]), towers.PerTower([1.0, 10.0]))

    There is a value for each tower, of any structure.
    """

    def __init__(self, values: Sequence[Any]):
        """Hold `values`, one for each tower, in tower order."""
        self.values = list(values)


@dataclasses.dataclass(frozen=True)
class Slice:
    """A tower's part of the batch."""

    batch: Any
    rows: BatchSlice | None  # of the batch; None: nothing was split
    count: Any = None  # number of its examples; 0 if it holds one row of padding

    def may_be_empty(self) -> bool:
        """Return whether the number of examples is a tensor, which may be 0."""
        return tf.is_tensor(self.count)

    def unpadded(self, leaf: Any) -> Any:
        """Return a result of the slice without the row of padding, if there is one."""
        if not self.may_be_empty() or leaf is None:
            return leaf
        # On a GPU these two integer ops run on the host; tf.where would copy from there.
        number = num_rows(leaf) * tf.minimum(self.count, 1)
        return _part(leaf, 0, BatchSlice(0, number, None))


def split(
    builder: Any, batch: Sequence[Any], num_rounds: int = 1, never_empty: bool = False
) -> list[Slice]:
    """Return each tower's slice of `batch`, round by round.

    Args:
        builder: the `TowerBuilder`; where it gathers, or on the host for a GPU, the batch is split.
        batch: a structure of tensors.
        num_rounds: parts of the batch, one after the other.
        never_empty: if the number of examples is a tensor, pad a slice without examples with the
            last example, and set its count to 0: functions may fail without examples.
    """
    num_towers, device = len(builder.devices), builder.gather_device
    with tf.device(HOST if is_gpu(device) else device), tf.name_scope("split"):
        leaves = as_leaves(batch, num_towers)
        sizes = [num_rows(leaf) for leaf in leaves if not isinstance(leaf, PerTower)]
        if not sizes:  # nothing to split: every tower runs once
            values = [[leaf.values[i] for leaf in leaves] for i in range(num_towers)]
            return [Slice(tf.nest.pack_sequence_as(batch, part), None) for part in values]
        known = list(dict.fromkeys(size for size in sizes if isinstance(size, int)))
        message = "the tensors of a batch must have the same size along axis 0"
        if len(known) > 1:
            raise ValueError(f"{message}, not {known}")
        total = known[0] if known else sizes[0]
        for size in sizes:
            if tf.is_tensor(size) and size is not total:
                tf.debugging.assert_equal(size, total, message)
        slices = []
        uneven = builder.checks.slice_sizes  # in a check
        starts = [(total - size if i else 0, size) for i, size in enumerate(uneven or ())]
        for i, (start, size) in enumerate(starts or slices_of(total, num_towers, num_rounds)):
            rows = BatchSlice(start, size, total)
            if never_empty and tf.is_tensor(size):
                rows = BatchSlice(tf.minimum(start, total - 1), tf.maximum(size, 1), total)
            part = [_part(leaf, i % num_towers, rows) for leaf in leaves]
            slices.append(Slice(tf.nest.pack_sequence_as(batch, part), rows, size))
        return slices


def slices_of(total: Any, num_towers: int, num_rounds: int) -> list[tuple[Any, Any]]:
    """Return (first row, number of rows) of each tower's slice, round by round.

    Args:
        total: number of rows of the batch, an int or a scalar tensor.
        num_towers: slices of each round; the first ones get a row more if need be.
        num_rounds: parts of the batch, one after the other.
    """

    def sizes_of(total: Any, number: int) -> list[Any]:
        return [(total + number - 1 - i) // number for i in range(number)]

    parts = sizes_of(total, num_rounds)
    sizes = [size for part in parts for size in sizes_of(part, num_towers)]
    stops = itertools.accumulate(sizes)
    return [(stop - size, size) for size, stop in zip(sizes, stops, strict=True)]


def is_split(batch: Sequence[Any]) -> bool:
    """Return whether a batch holds anything but `PerTower` and None."""
    return not all(isinstance(leaf, PerTower | None) for leaf in tf.nest.flatten(batch))


def as_leaves(batch: Sequence[Any], num_towers: int | None = None) -> list[Any]:
    """Return the leaves of a batch: tensors to split along axis 0, or `PerTower`s.

    Args:
        batch: a structure of tensors, arrays, None and `PerTower`s.
        num_towers: values that a `PerTower` must hold; None for any number.

    Raises:
        ValueError: a `PerTower` holds another number of values.
        InputError: a leaf is a scalar, or no tensor and no array.
    """
    leaves = []
    for leaf in tf.nest.flatten(batch):
        if leaf is None:
            leaf = PerTower([None] * (num_towers or 1))
        if isinstance(leaf, PerTower):
            if num_towers not in (None, len(leaf.values)):
                raise ValueError(
                    f"PerTower holds {len(leaf.values)} values for {num_towers} towers; "
                    "give one for each"
                )
        elif not (isinstance(leaf, tf.RaggedTensor | tf.SparseTensor) or _is_on_towers(leaf)):
            kind = type(leaf).__name__
            try:
                leaf = tf.convert_to_tensor(leaf)
            except (TypeError, ValueError) as error:
                raise InputError(
                    "a batch can hold only tensors and arrays, which are split along axis 0, not a "
                    f"{kind}; pass its tensors in a dict or a tuple"
                ) from error
            if leaf.shape.rank == 0:
                raise InputError(
                    "a batch is split along axis 0 and cannot hold scalars; convert a list of "
                    "numbers to an array; capture a single value in the function, or pass it as "
                    "towers.PerTower"
                )
        leaves.append(leaf)
    return leaves


def occupied(slices: Sequence[Slice]) -> list[Slice]:
    """Return the slices without the last ones that surely hold no example, at least one."""
    return [part for part in slices if not _is_empty(part)] or list(slices[:1])


def rounds(builder: Any, batch: Sequence[Any], number: int) -> list[list[Slice]]:
    """Split `batch` into a number of rounds; return the occupied slices of each that has any.

    Args:
        builder: of the towers.
        batch: the arguments of a tower function.
        number: of rounds.
    """
    slices, num_towers = split(builder, batch, number, never_empty=True), len(builder.devices)
    parts = [slices[i : i + num_towers] for i in range(0, len(slices), num_towers)]
    return [occupied(part) for i, part in enumerate(parts) if not i or not _is_empty(part[0])]


def _is_empty(part: Slice) -> bool:
    return isinstance(part.count, int) and part.count == 0


def _is_on_towers(leaf: Any) -> bool:
    # Whether the examples are on the towers' devices, as those of `data.device_cache`.
    return hasattr(leaf, "of_tower")


def _part(leaf: Any, tower: int, rows: BatchSlice) -> Any:
    if isinstance(leaf, PerTower):
        return leaf.values[tower]
    part = slice(rows.start, rows.start + rows.size)
    if _is_on_towers(leaf):
        return leaf.of_tower(tower, part)
    if isinstance(leaf, tf.SparseTensor):
        rest = leaf.dense_shape[1:]
        first, size = (tf.cast([number], tf.int64) for number in (rows.start, rows.size))
        return tf.sparse.slice(leaf, tf.concat([first, rest * 0], 0), tf.concat([size, rest], 0))
    # A tensor on a GPU is sliced there, not copied as a whole.
    device = getattr(leaf, "device", None) or ""
    with tf.device(device) if is_gpu(device) else contextlib.nullcontext():
        sliced = leaf[part]
    mask = tf_internals.mask_of(leaf)  # AutoGraph, which may convert this, has no :=
    if mask is not None:
        tf_internals.set_mask(sliced, mask[part])
    return sliced


def num_rows(value: tf.Tensor | tf.RaggedTensor | tf.SparseTensor) -> int | tf.Tensor:
    """Return the size of axis 0, an int if it is known."""
    known = tf.compat.dimension_value(value.shape[0])
    if known is not None:
        return known
    if isinstance(value, tf.SparseTensor):
        return tf.cast(value.dense_shape[0], tf.int32)
    return value.nrows(tf.int32) if isinstance(value, tf.RaggedTensor) else tf.shape(value)[0]
