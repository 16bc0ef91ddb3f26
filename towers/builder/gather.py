"""Gather policies: pure functions from the towers' values to one value, or to one for each tower.

`add_n` on the gather device is the pattern. Gradients are also summed on every tower, by
collectives, or beside variables that are spread over the workers of a cluster. Values of GPUs are
packed: few ops and transfers gather them.
"""

import contextlib
import dataclasses
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import tensorflow as tf

from towers import tf_internals
from towers.builder import collectives, cross_host
from towers.builder.device_types import is_gpu
from towers.builder.flatten import grouped, num_bytes, pack, unpack
from towers.errors import InputError


def map_towers(policy: Callable, results: Sequence[Any]) -> Any:
    """Apply a gather policy to each leaf of the towers' results; return their structure.

    Args:
        policy: maps the list of towers' values of one leaf to one value.
        results: of each tower a structure.

    Raises:
        ValueError: the structures differ.
    """
    for i, result in enumerate(results):
        try:
            tf.nest.assert_same_structure(results[0], result)
        except (TypeError, ValueError):
            raise ValueError(
                f"towers must return the same structure: tower 0 returned {results[0]!r}, "
                f"tower {i} returned {result!r}"
            ) from None
    return tf.nest.map_structure(lambda *values: policy(values), *results)


class StaticIndexedSlices(tf.IndexedSlices):
    """A sparse gradient whose rows do not depend on the examples, as of a position embedding.

    All towers have the same rows. They are added row by row: optimizers square each row.
    """


def add_sparse(values: Sequence[Any]) -> Any:
    """Return the sum of `IndexedSlices`, sparse, or of integers; None if there are none."""
    if not values or isinstance(values[0], int):
        return sum(values) if values else None
    if all(isinstance(value, StaticIndexedSlices) for value in values):
        rows = tf.add_n([value.values for value in values], name="AddN")
        return StaticIndexedSlices(rows, values[0].indices, values[0].dense_shape)
    indices = [value.indices for value in values]
    if len({places.dtype for places in indices}) > 1:  # a GPU's and a CPU's
        indices = [tf.cast(places, tf.int64) for places in indices]
    rows = tf.concat([value.values for value in values], axis=0)
    return tf.IndexedSlices(rows, tf.concat(indices, axis=0), values[0].dense_shape)


def add_by_machine(plan: "GatherPlan") -> Callable:
    """Return the policy that adds values on each machine, then the machines' sums."""

    def policy(values: Sequence[Any]) -> Any:
        shapes = [v.shape for v in values if isinstance(v, tf.Tensor)]
        if not all(shape.is_compatible_with(shapes[0]) for shape in shapes):
            raise InputError(
                "sum adds up what the towers return, and these are of shapes "
                f"{', '.join(map(str, shapes))}: join rows by builder.concat, or reduce them in "
                "the function, as by tf.reduce_sum(..., axis=0)"
            )
        return plan.add(cross_host.sum_by_machine(values, plan))

    return policy


def join(values: Sequence[Any]) -> Any:
    """Concatenate per-tower values along axis 0, with their Keras masks, without the Nones."""
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
    masks = [tf_internals.attached(value, "mask") for value in values]
    if all(mask is not None for mask in masks):
        tf_internals.attach(joined, "mask", tf.concat(masks, axis=0))
    return joined


@dataclasses.dataclass(frozen=True)
class GatherPlan:
    """The devices of the towers, and those on which their values are added."""

    towers: Sequence[str]  # their devices; the last towers may have no value
    home: str  # the gather device
    add: Callable[[Sequence[Any]], Any]  # the sum of a list of values, on the current device
    of_variables: Sequence[str] | None = None  # for each variable's gradient; None: home


def plan_of(builder: Any, variables: Sequence[Any] = ()) -> GatherPlan:
    """Return where a builder gathers the gradients of these variables or tensors.

    Args:
        builder: the `TowerBuilder`.
        variables: `tf.Variable`s and tensors; none for values that go to the gather device.
    """
    of_variables, home = None, builder.gather_device
    if builder.gather_at_variables:
        of_variables = [home if isinstance(v, tf.Tensor) else v.device for v in variables]
    return GatherPlan(builder.devices, home, builder.add, of_variables)


def sum_gradients(
    gradients: Sequence[Sequence[Any]], plan: GatherPlan, on_every_tower: bool
) -> list[list[Any]]:
    """Return the sums of the towers' gradients: for each tower on its device, or else one list.

    Args:
        gradients: for each tower a list of gradients or other values; None where it has none.
        plan: where the towers are, and where their gradients are added.
        on_every_tower: whether each tower gets the sums.
    """
    if on_every_tower:
        return sum_on_every_tower(gradients, plan)
    return [reduce_to(gradients, plan)]


def reduce_to(gradients: Sequence[Sequence[Any]], plan: GatherPlan) -> list[Any]:
    """Return the sums of the towers' gradients, each on the device that `plan` gives.

    Gradients from GPUs are packed into few tensors for each type and target.

    Args:
        gradients: for each tower a list of gradients or other values; None where it has none.
        plan: where the towers are, and where each of the gradients is added.
    """
    columns = list(zip(*gradients, strict=True))
    targets = [*(plan.of_variables or ()), *[plan.home] * len(columns)]
    packs = [_are_dense(values) and is_gpu(plan.towers[0]) for values in columns]
    kind = lambda i: (targets[i], columns[i][0].dtype) if packs[i] else None  # noqa: E731
    size = lambda i: num_bytes(columns[i][0]) if packs[i] else 0  # noqa: E731
    sums: list[Any] = [None] * len(columns)
    for group in grouped(range(len(columns)), kind, size):
        first = group[0]
        if len(group) == 1:
            of_machines = cross_host.sum_by_machine(columns[first], plan)
            with tf.device(targets[first]):
                sums[first] = plan.add(of_machines)
            continue
        packed = []
        for device, tower_gradients in zip(plan.towers, gradients, strict=False):
            with tf.device(device):
                packed.append(pack([tower_gradients[i] for i in group]))
        packed = cross_host.sum_by_machine(packed, plan)
        with tf.device(targets[first]):
            parts = unpack(plan.add(packed), [columns[i][0] for i in group])
        for i, part in zip(group, parts, strict=True):
            sums[i] = part
    return sums


def add_to(totals: Sequence[Any], results: Sequence[Any], plan: GatherPlan) -> list[Any]:
    """Add each tower's result to its total, on its device; return the totals.

    Args:
        totals: of each tower a structure of tensors; empty before the first round.
        results: like `totals`; the last towers may have none.
        plan: where the towers are.
    """
    if not totals:
        return list(results)
    added = list(totals)
    for i, result in enumerate(results):
        device, both = plan.towers[i], [tf.nest.flatten(value) for value in (totals[i], result)]
        with tf.name_scope(f"tower_{i}"):
            sums = reduce_to(both, GatherPlan([device] * 2, device, plan.add))
        added[i] = tf.nest.pack_sequence_as(result, sums)
    return added


def sum_on_every_tower(gradients: Sequence[Sequence[Any]], plan: GatherPlan) -> list[list[Any]]:
    """Return the sums of the towers' gradients, for each tower on its device, by collectives.

    Gradients that are sparse, complex, or missing in a tower, are gathered by `add_n` and copied
    back.

    Args:
        gradients: of each tower a list like the variables; None where it has none.
        plan: where the towers are.
    """
    columns, towers = list(zip(*gradients, strict=True)), plan.towers
    full = len(gradients) == len(towers)
    packed = [
        i
        for i, values in enumerate(columns)
        if full and _are_dense(values) and not values[0].dtype.is_complex  # there is no such sum
    ]
    results: list[list[Any]] = [[None] * len(columns) for _ in towers]
    if packed:
        values = [[tower_gradients[i] for i in packed] for tower_gradients in gradients]
        for result, sums in zip(results, collectives.all_sum(values, towers), strict=True):
            for i, value in zip(packed, sums, strict=True):
                result[i] = value
    for i, values in enumerate(columns):
        if i not in packed:
            with tf.device(plan.home):
                total = plan.add(values)
            for result in results:
                result[i] = total
    return results


def _are_dense(values: Sequence[Any]) -> bool:
    return all(isinstance(v, tf.Tensor) and v.shape.is_fully_defined() for v in values)


def zero_if_empty(gradient: Any, count: tf.Tensor) -> Any:
    """Return a gradient, as zeros if the tower has no example: the mean over none is NaN.

    Args:
        gradient: dense or sparse; None stays None.
        count: number of the tower's examples, a scalar tensor.
    """
    return map_values(
        lambda values: tf.math.multiply_no_nan(values, tf.cast(count > 0, values.dtype)), gradient
    )


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
