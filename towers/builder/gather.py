"""Gather policies: pure functions from what each tower has to one value, or to one for each tower.

`add_n` on the gather device is the pattern. Two others serve gradients of variables that lie
elsewhere: each sum where its variable lies, and sums on every tower by collectives.
"""

import contextlib
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import Any

import tensorflow as tf

from towers import tf_private
from towers.builder import collectives
from towers.builder.assignments import widen
from towers.builder.splitting import PerTower


def map_towers(policy: Callable, results: Sequence[Any]) -> Any:
    """Apply `policy` to the towers' values at each place of the results' structure."""
    for i, result in enumerate(results):
        try:
            tf.nest.assert_same_structure(results[0], result)
        except (TypeError, ValueError):
            raise ValueError(
                f"towers must return the same structure: tower 0 returned {results[0]!r}, "
                f"tower {i} returned {result!r}"
            ) from None
    return tf.nest.map_structure(lambda *values: policy(values), *results)


class FixedRows(tf.IndexedSlices):
    """A sparse gradient of rows that examples do not choose: of the positions in a text.

    Each tower has the same rows, one device has each of them once, and optimizers square those.
    """


def add(values: Sequence[Any]) -> Any:
    """Sum per-tower values; None counts as nothing, and all-sparse values stay sparse."""
    values = [value for value in values if value is not None]
    if not values:
        return None
    if all(isinstance(value, tf.IndexedSlices) for value in values):
        if all(isinstance(value, FixedRows) for value in values):
            rows = tf.add_n([value.values for value in values], name="AddN")
            return FixedRows(rows, values[0].indices, values[0].dense_shape)
        return tf.IndexedSlices(
            tf.concat([value.values for value in values], axis=0),
            tf.concat([value.indices for value in values], axis=0),
            values[0].dense_shape,
        )
    # The name makes add_n move a single value to the gather device too.
    return tf.add_n([tf.convert_to_tensor(value) for value in values], name="AddN")


def join(values: Sequence[Any]) -> Any:
    """Join per-tower values along axis 0, with their Keras masks; None counts as nothing."""
    values = [value for value in values if value is not None]
    if values and isinstance(values[0], tf.SparseTensor):
        return tf.sparse.concat(0, list(values))
    values = [
        value if isinstance(value, tf.RaggedTensor) else tf.convert_to_tensor(value)
        for value in values
    ]
    if any(value.shape.rank == 0 for value in values):
        raise ValueError("concat joins along axis 0 and cannot join scalars: use sum or map")
    if not values:
        return None
    joined = tf.concat(values, axis=0)
    masks = [tf_private.mask_of(value) for value in values]
    if all(mask is not None for mask in masks):
        tf_private.set_mask_of(joined, tf.concat(masks, axis=0))
    return joined


def means(
    gradients: Sequence[Sequence[Any]],
    variables: Sequence[Any],
    devices: Sequence[str],
    gather_device: str,
    places: Sequence[str] | None,
    count: tf.Tensor,
) -> list[Any]:
    """Return the mean gradients of variables, from each tower's sums over its examples.

    A `PerTower` is a variable with copies, and its means are one, too; without these each gradient
    is gathered at a place of its own if there are `places`, else on the gather device.
    """
    if not any(isinstance(v, PerTower) for v in variables):
        return mean_at(gradients, places or [gather_device] * len(variables), count)
    on_towers = mean_on_every_tower(gradients, devices, gather_device, count)
    pairs = zip(zip(*on_towers, strict=True), variables, strict=True)
    return [PerTower(mean) if isinstance(v, PerTower) else mean[0] for mean, v in pairs]


def mean_at(
    gradients: Sequence[Sequence[Any]], places: Sequence[str], count: tf.Tensor
) -> list[Any]:
    """Add up each gradient and divide it by the number of examples, on a device of its own."""
    means = []
    for values, place in zip(zip(*gradients, strict=True), places, strict=True):
        with tf.device(place):
            means.append(divide(add(values), count))
    return means


def mean_on_every_tower(
    gradients: Sequence[Sequence[Any]], devices: Sequence[str], gather_device: str, count: tf.Tensor
) -> list[list[Any]]:
    """Add up the gradients by collectives; return for each device the means, on it.

    Sparse ones, and those that not all towers have, are gathered with `add_n` and handed out; the
    last towers have none if there was no example for them.
    """
    columns = list(zip(*gradients, strict=True))
    full = len(gradients) == len(devices)
    dense = [full and all(isinstance(v, tf.Tensor) for v in values) for values in columns]
    means: list[list[Any]] = [[None] * len(columns) for _ in devices]
    packed = [i for i, together in enumerate(dense) if together]
    if packed:
        sums = collectives.all_sum([[own[i] for i in packed] for own in gradients], devices)
        for device, own, result in zip(devices, sums, means, strict=True):
            with tf.device(device):
                for i, value in zip(packed, own, strict=True):
                    result[i] = divide(value, count)
    for i, values in enumerate(columns):
        if not dense[i]:
            with tf.device(gather_device):
                mean = divide(add(values), count)
            for result in means:
                result[i] = mean
    return means


def divide(gradient: Any, count: tf.Tensor) -> Any:
    """Divide a summed gradient by the number of examples, which 16 bits cannot hold."""

    def quotient(values: tf.Tensor) -> tf.Tensor:
        wide = widen(values)
        return tf.cast(wide / tf.cast(count, wide.dtype), values.dtype)

    return map_values(quotient, gradient)


def zero_if_empty(gradient: Any, count: tf.Tensor) -> Any:
    """Return zeros if the tower had no example: a mean over none has given NaN."""
    return map_values(
        lambda values: tf.math.multiply_no_nan(values, tf.cast(count > 0, values.dtype)), gradient
    )


def map_values(fn: Callable, gradient: Any) -> Any:
    """Apply `fn` to the values of a gradient: dense, sparse or None."""
    if gradient is None:
        return None
    if isinstance(gradient, tf.IndexedSlices):
        return type(gradient)(fn(gradient.values), gradient.indices, gradient.dense_shape)
    return fn(gradient)


def fix_rows(
    gradients: Sequence[Any], variables: Sequence[tf.Variable], fixed: Collection[int]
) -> list[Any]:
    """Return a tower's gradients, those of variables with these ids as `FixedRows`."""
    return [
        FixedRows(g.values, g.indices, g.dense_shape)
        if id(variable) in fixed and isinstance(g, tf.IndexedSlices)
        else g
        for g, variable in zip(gradients, variables, strict=True)
    ]


@contextlib.contextmanager
def after(values: Any) -> Iterator[None]:
    """Let each op in the block wait for all these values, by one op and not by one edge each."""
    with tf.control_dependencies(tensors(values)):
        ready = tf.no_op()
    with tf.control_dependencies([ready]):
        yield


def tensors(structure: Any) -> list[tf.Tensor]:
    """Return the tensors of a structure, those of sparse ones too."""
    leaves = tf.nest.flatten(structure, expand_composites=True)
    return [leaf for leaf in leaves if leaf is not None]
