"""Gather policies: pure functions from the towers' values to one value, or to one for each tower.

`add_n` on the gather device is the pattern. Gradients are also summed on every tower, by
collectives, or beside variables that are spread over the workers of a cluster. Values of GPUs are
packed: few ops and transfers gather them.
"""

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import tensorflow as tf

from towers import tf_internals
from towers.builder import collectives
from towers.builder.device_types import is_gpu, machine_of
from towers.builder.flatten import grouped, num_bytes, pack, unpack


class StaticIndexedSlices(tf.IndexedSlices):
    """A sparse gradient whose rows do not depend on the examples, as of a position embedding.

    All towers have the same rows. They are added row by row: optimizers square each row.
    """


def add_sparse(values: Sequence[Any]) -> Any:
    """Return the sum of `IndexedSlices`, sparse; None if there are none."""
    if not values:
        return None
    if all(isinstance(value, StaticIndexedSlices) for value in values):
        rows = tf.add_n([value.values for value in values], name="AddN")
        return StaticIndexedSlices(rows, values[0].indices, values[0].dense_shape)
    rows = tf.concat([value.values for value in values], axis=0)
    indices = tf.concat([value.indices for value in values], axis=0)
    return tf.IndexedSlices(rows, indices, values[0].dense_shape)


def join(values: Sequence[Any]) -> Any:
    """Concatenate per-tower values along axis 0, with their Keras masks, without the Nones."""
    values = [value for value in values if value is not None]
    values = [
        value if isinstance(value, tf.RaggedTensor) else tf.convert_to_tensor(value)
        for value in values
    ]
    if any(value.shape.rank == 0 for value in values):
        raise ValueError("concat joins along axis 0 and cannot join scalars: use sum or map")
    if not values:
        return None
    joined = tf.concat(values, axis=0)
    masks = [tf_internals.attached(value, "mask") for value in values]
    if all(mask is not None for mask in masks):
        tf_internals.attach(joined, "mask", tf.concat(masks, axis=0))
    return joined


def sum_gradients(
    builder: Any,
    gradients: Sequence[Sequence[Any]],
    variables: Sequence[Any],
    on_every_tower: bool,
) -> list[list[Any]]:
    """Return the sums of the towers' gradients: for each tower on its device, or else one list.

    Args:
        builder: the `TowerBuilder`.
        gradients: for each tower a list of gradients, and perhaps of other values; None where it
            has none.
        variables: of the gradients, `tf.Variable`s and tensors.
        on_every_tower: whether each tower gets the sums.
    """
    if on_every_tower:
        return _sum_on_every_tower(builder, gradients)
    targets = [builder.gather_device] * len(gradients[0])
    if builder.gather_at_variables:
        for i, variable in enumerate(variables):
            targets[i] = targets[i] if isinstance(variable, tf.Tensor) else variable.device
    return [_sum_on(targets, gradients, builder.devices, builder.add)]


def add_to(builder: Any, totals: Sequence[Any], results: Sequence[Any]) -> list[Any]:
    """Add each tower's result to its total, on its device; return the totals.

    Args:
        builder: the `TowerBuilder`.
        totals: of each tower a structure of tensors; empty before the first round.
        results: like `totals`; the last towers may have none.
    """
    if not totals:
        return list(results)
    added = list(totals)
    for i, result in enumerate(results):
        both, devices = [tf.nest.flatten(each) for each in (totals[i], result)], builder.devices
        with tf.name_scope(f"tower_{i}"):
            sums = _sum_on([devices[i]] * len(both[0]), both, [devices[i]] * 2, builder.add)
        added[i] = tf.nest.pack_sequence_as(result, sums)
    return added


def _sum_on(
    targets: Sequence[str],
    gradients: Sequence[Sequence[Any]],
    devices: Sequence[str],
    add: Callable,
) -> list[Any]:
    """Return the sums of the towers' gradients, each on its target's device.

    Those of GPUs are packed for each type and target.
    """
    columns = list(zip(*gradients, strict=True))
    packs = [_are_dense(values) and is_gpu(devices[0]) for values in columns]
    kind = lambda i: (targets[i], columns[i][0].dtype) if packs[i] else None  # noqa: E731
    size = lambda i: num_bytes(columns[i][0]) if packs[i] else 0  # noqa: E731
    sums: list[Any] = [None] * len(columns)
    for group in grouped(range(len(columns)), kind, size):
        first, values = group[0], columns[group[0]]
        if packs[first]:
            values = []
            for device, tower_gradients in zip(devices, gradients, strict=False):
                with tf.device(device):
                    values.append(pack([tower_gradients[i] for i in group]))
        values = _sum_of_each_machine(values, devices, add)
        with tf.device(targets[first]):
            total = add(values)
            parts = unpack(total, [columns[i][0] for i in group]) if packs[first] else [total]
        for i, part in zip(group, parts, strict=True):
            sums[i] = part
    return sums


def _sum_of_each_machine(
    values: Sequence[Any], devices: Sequence[str], add: Callable
) -> Sequence[Any]:
    # A machine's values are summed there before they are sent; those of this process stay apart.
    of_machines: dict[str, list[tuple[Any, str]]] = {}
    for value, device in zip(values, devices, strict=False):
        of_machines.setdefault(machine_of(device), []).append((value, device))
    if not any(of_machines):
        return values
    sums = []
    for pairs in of_machines.values():
        with tf.device(pairs[0][1]):
            own = [value for value, _ in pairs]
            sums.append(own[0] if len(own) == 1 else add(own))
    return sums


def _sum_on_every_tower(builder: Any, gradients: Sequence[Sequence[Any]]) -> list[list[Any]]:
    """Return the sums of the towers' gradients, for each tower on its device, by collectives.

    What collectives cannot add is gathered by `add_n`: gradients that are sparse, complex, or
    missing in a tower, and all if towers run one after the other or share a device.
    """
    columns, devices = list(zip(*gradients, strict=True)), builder.devices
    apart = len(set(devices)) == len(devices) == len(gradients) and not tf.executing_eagerly()
    packed = [
        i
        for i, values in enumerate(columns)
        if apart and _are_dense(values) and not values[0].dtype.is_complex
    ]
    results: list[list[Any]] = [[None] * len(columns) for _ in devices]
    values = [[tower_gradients[i] for i in packed] for tower_gradients in gradients]
    for result, sums in zip(results, collectives.all_sum(values, devices), strict=False):
        for i, value in zip(packed, sums, strict=True):
            result[i] = value
    for i in set(range(len(columns))) - set(packed):
        with tf.device(builder.gather_device):
            total = builder.add(columns[i])
        for result in results:
            result[i] = total
    return results


def _are_dense(values: Sequence[Any]) -> bool:
    return all(isinstance(v, tf.Tensor) and v.shape.is_fully_defined() for v in values)


def map_values(fn: Callable, gradient: Any) -> Any:
    """Apply a function to the values of a gradient; return the gradient of its results.

    Args:
        fn: maps a tensor to one of the same shape.
        gradient: dense or sparse; None stays None.
    """
    if gradient is None:
        return None
    if isinstance(gradient, tf.IndexedSlices):
        return type(gradient)(fn(gradient.values), gradient.indices, gradient.dense_shape)
    return fn(gradient)


@contextlib.contextmanager
def after(values: Any) -> Iterator[None]:
    """Make each op in the block wait for all these values, by one op in place of many edges."""
    ready = []
    if values := tensors(values):
        with tf.control_dependencies(values):
            ready = [tf.no_op()]
    with tf.control_dependencies(ready):
        yield


def tensors(structure: Any) -> list[tf.Tensor]:
    """Return the tensors in a structure, also the components of sparse and ragged ones."""
    leaves = tf.nest.flatten(structure, expand_composites=True)
    return [leaf for leaf in leaves if tf.is_tensor(leaf)]
