"""The loss function of a tower: the sum over its slice, and checks of losses and variables."""

import dataclasses
import itertools
from collections.abc import Callable, Sequence
from typing import Any

import keras
import tensorflow as tf

from towers import tf_internals
from towers.builder.function_analysis import FunctionAnalysis
from towers.builder.gather import GatherPlan, map_values
from towers.builder.replica_scope import ReplicaScope
from towers.builder.sharding import PerTower, Slice
from towers.builder.variable_aggregation import widen
from towers.errors import InputError

_NO_LOSSES = (
    "loss_fn must return one loss for each example, shape [b], not {}: reduce all axes but the "
    "first, the builder takes the mean over all towers (a Keras loss: reduction=None)"
)


@dataclasses.dataclass(frozen=True)
class TowerSums:
    """Each tower's sums over its examples; the last towers are missing if they have none."""

    losses: list[tf.Tensor]  # sums, scalars
    counts: list[Any]  # numbers of examples, scalar tensors where unknown
    gradients: list[list[Any]]  # sums: for each tower a list like the variables
    scopes: list[ReplicaScope]  # what the towers assigned
    policies: dict[int, str]  # how to aggregate it, see `variable_aggregation.assign_once`
    outputs: list[Any]  # the other results of `loss_fn` for each slice, in order

    @property
    def has_outputs(self) -> bool:
        """Whether `loss_fn` returned more than losses."""
        return not isinstance(self.outputs[0], tuple) or bool(self.outputs[0])


def summed(loss_fn: Callable, part: Slice) -> Callable:
    """Return a function from a slice's batch to (sum of losses, number of examples, outputs).

    Args:
        loss_fn: as for `TowerBuilder.gradients`; outputs are () if it returns losses alone.
        part: the slice, by which the losses are checked.
    """
    loss_fn = tf_internals.converted_as_here(loss_fn)

    def sum_of_losses(*batch: Any) -> tuple[tf.Tensor, Any, Any]:
        returned = loss_fn(*batch)
        losses, outputs = returned if isinstance(returned, tuple) else (returned, ())
        losses = _checked(losses, part)
        total = tf.reduce_sum(losses)
        if part.may_be_empty():
            total = tf.math.multiply_no_nan(total, tf.cast(part.count > 0, total.dtype))
        count = losses.shape[0] if part.count is None else part.count
        if not isinstance(count, int):
            count = tf.cast(tf.shape(losses)[0] if count is None else count, total.dtype)
        return total, count, outputs

    return sum_of_losses


def gradients_of_sum(
    gradient: Callable, loss: tf.Tensor, variables: Sequence[tf.Variable], replica: Any
) -> list[Any]:
    """Return the gradients of a slice's sum of losses.

    Float16 may hold no gradient but that of the mean over the batch: it is taken, then multiplied
    back to the sum, in float32 at least.

    Args:
        gradient: `gradient` of the tape that has recorded the forward pass.
        loss: the sum, a scalar.
        variables: those that the tower reads.
        replica: the tower's `ReplicaContext`.
    """
    rows, upstream = replica.part.rows, None
    if rows is not None and _has_float16(variables):
        total = tf.cast(rows.total, loss.dtype)
        upstream = 1.0 / total
    with replica.replaced():  # layers may be called again
        gradients = gradient(loss, variables, upstream)
    gradients = replica.zero_if_empty(gradients)
    if upstream is None:
        return gradients

    def times_total(x: tf.Tensor) -> tf.Tensor:
        return widen(x) * tf.cast(total, widen(x).dtype)

    return [map_values(times_total, g) for g in gradients]


def _has_float16(variables: Sequence[tf.Variable]) -> bool:
    # The towers' computation is looked for in the graph that it is traced into.
    ops = [] if tf.executing_eagerly() else tf.compat.v1.get_default_graph().get_operations()
    tensors = itertools.chain.from_iterable(op.outputs for op in ops)
    return any(x.dtype == tf.float16 for x in (*variables, *tensors))


def finish(gradients: Sequence[Any], variables: Sequence[Any]) -> list[Any]:
    """Return gathered gradients in the dtypes of their variables.

    Args:
        gradients: means over all examples; a `PerTower` for copies.
        variables: as for `TowerBuilder.gradients`.
    """

    def cast(gradient: Any, dtype: tf.DType) -> Any:
        if isinstance(gradient, PerTower):
            return PerTower([cast(value, dtype) for value in gradient.values])
        return map_values(lambda x: tf.cast(x, dtype), gradient)

    return [cast(g, v.dtype) for g, v in zip(gradients, masters_of(variables), strict=True)]


def check_by_example(analysis: FunctionAnalysis) -> None:
    """Raise InputError if a loss function's losses or outputs have no row for each example."""
    if analysis.by_example is False:
        shape = next(iter(analysis.trace.shapes), None) if analysis.trace else None
        scalar = shape is not None and shape.rank == 0
        raise InputError(_NO_LOSSES.format("a scalar" if scalar else "another shape"))
    if analysis.trace and analysis.trace.not_by_example[1:]:
        analysis.check_joinable()


def _checked(losses: Any, part: Slice) -> tf.Tensor:
    losses = tf.convert_to_tensor(losses)
    if not losses.dtype.is_floating:
        raise InputError(
            f"loss_fn must return floating-point losses, not {losses.dtype.name}, which have no "
            "gradients: cast what they are computed from to float32"
        )
    if losses.shape.rank not in (None, 1):
        raise InputError(_NO_LOSSES.format(losses.shape))
    size = None if part.rows is None else part.rows.size
    known = tf.compat.dimension_value(losses.shape[0])
    if isinstance(size, int) and known not in (None, size):
        raise InputError(_NO_LOSSES.format(f"{losses.shape} for {size} examples"))
    if size is not None and (known is None or tf.is_tensor(size)):
        tf.debugging.assert_equal(tf.shape(losses)[0], size, _NO_LOSSES.format("fewer or more"))
    return widen(losses)


def variables_and_copies(
    variables: Sequence[Any], tower: int
) -> tuple[list[tf.Variable], dict[int, tf.Variable]]:
    """Return the variables that a tower reads, and {id of the one in `loss_fn`: its own copy}.

    Args:
        variables: as for `TowerBuilder.gradients`.
        tower: number of the tower.

    Raises:
        ValueError: there is something else among them.
    """
    tower_variables = []
    for variable in variables:
        variable = variable.values[tower] if isinstance(variable, PerTower) else variable
        if not isinstance(variable, keras.Variable | tf.Variable):
            raise ValueError(
                "variables must be a list of tf.Variables or keras.Variables, but holds "
                f"{variable!r}"
            )
        tower_variables.append(variable.value if isinstance(variable, keras.Variable) else variable)
    pairs = zip(variables, tower_variables, strict=True)
    return tower_variables, {id(v.values[0]): copy for v, copy in pairs if isinstance(v, PerTower)}


def masters_of(variables: Sequence[Any]) -> list[tf.Variable]:
    """Return the `tf.Variable`s that the first tower reads: of copies, the first."""
    return variables_and_copies(variables, 0)[0]


def gather_plan(builder: Any, variables: Sequence[Any] = ()) -> GatherPlan:
    """Return where a builder gathers the gradients of these variables or tensors.

    Args:
        builder: the `TowerBuilder`.
        variables: none for values that are gathered on the gather device.
    """
    of_variables, home = None, builder.gather_device
    if builder.gather_at_variables:
        of_variables = [
            home if isinstance(v, tf.Tensor) else masters_of([v])[0].device for v in variables
        ]
    return GatherPlan(builder.devices, home, builder.add, of_variables)
