"""The gradients of one tower's slice, and what is asked of a loss function and its variables."""

import contextlib
import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import keras
import tensorflow as tf

from towers.builder import xla
from towers.builder.added_losses import AddedLoss, noted
from towers.builder.assignments import TowerScope
from towers.builder.gather import map_values, zero_if_empty
from towers.builder.merging import widen
from towers.builder.splitting import PerTower, Slice
from towers.errors import InputError

_NO_LOSSES = (
    "loss_fn must return one loss for each example, shape [b], not {}: reduce all axes but the "
    "first, the builder takes the mean over all towers (a Keras loss: reduction=None)"
)


@dataclasses.dataclass(frozen=True)
class TowerSums:
    """What each tower has of its examples; the last towers may be missing, if there was none."""

    losses: list[tf.Tensor]  # sums, scalars
    counts: list[Any]  # numbers of examples, scalar tensors if they are not known
    gradients: list[list[Any]]  # of each tower a list like the variables: sums
    scopes: list[TowerScope]  # what the towers assigned
    policies: dict[int, str]  # how these values make one, see `merging.assign_once`
    outputs: list[Any]  # what else `loss_fn` returned for each slice, in their order


def sums_of_slice(
    loss_fn: Callable,
    variables: Sequence[tf.Variable],
    part: Slice,
    inside: contextlib.AbstractContextManager[TowerScope],
    by_xla: bool,
    added: Sequence[AddedLoss] = (),
) -> tuple[TowerScope, tuple, Any]:
    """Return what `loss_fn` assigns, (sum of losses, their number, gradients of the sum), outputs.

    It is called with the slice in the block of `inside`, see there, and may be compiled by XLA. The
    outputs are what it returns beside the losses, () if there is nothing, and what it leaves in
    attributes: see `SideOutputs.around`. Of the losses that layers add, which `loss_fn` may read,
    it is known how they make those of the batch.
    """

    def compute() -> tuple:
        with inside as scope:
            with tf.GradientTape(watch_accessed_variables=False) as tape:
                tape.watch(variables)
                with noted(scope, part.rows, added):
                    returned, left = loss_fn(*part.batch)
                losses, outputs = returned if isinstance(returned, tuple) else (returned, ())
                losses = _checked(losses, part)
                loss = tf.reduce_sum(losses)
                if part.may_be_empty():
                    loss = tf.math.multiply_no_nan(loss, tf.cast(part.count > 0, loss.dtype))
            # What is recomputed in the backward pass runs in what the forward pass ran in; what it
            # assigns was assigned above.
            with TowerScope(scope.own, scope.device, outer=scope.outer, fetch=scope.fetch):
                gradients = _gradients(tape, loss, variables, part, scope)
        count = losses.shape[0] if part.count is None else part.count
        if not isinstance(count, int):
            count = tf.cast(tf.shape(losses)[0] if count is None else count, loss.dtype)
        if part.may_be_empty():
            gradients = [zero_if_empty(g, count) for g in gradients]
        scope.close(count)
        return scope, ((loss, count, gradients), (outputs, left))

    scope, ((loss, count, gradients), outputs) = xla.compiled(compute) if by_xla else compute()
    scope.count = part.count if isinstance(part.count, int) else count
    return scope, (loss, scope.count, gradients), tf.nest.map_structure(part.kept, outputs)


def _gradients(
    tape: tf.GradientTape,
    loss: tf.Tensor,
    variables: Sequence[tf.Variable],
    part: Slice,
    scope: TowerScope,
) -> list[Any]:
    """Return the gradients of a slice's sum of losses.

    What float8 keeps of the gradients of outputs is of the mean over all examples.
    """
    if not scope.overwritten or part.rows is None:
        return tape.gradient(loss, variables)
    total = tf.cast(part.rows.total, loss.dtype)
    return [
        g if id(v) in scope.overwritten else map_values(lambda x: x * tf.cast(total, x.dtype), g)
        for g, v in zip(tape.gradient(loss, variables, 1.0 / total), variables, strict=True)
    ]


def check_rehearsed(by_example: bool | None) -> None:
    """Refuse a loss function whose rehearsal has given no row for each example."""
    if by_example is False:
        raise InputError(_NO_LOSSES.format("another shape"))


def _checked(losses: Any, part: Slice) -> tf.Tensor:
    """Return `losses` as a tensor [b], in float32 at least: sums in 16 bits lose examples."""
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
    """Return the variables that a tower reads, and {id of what `loss_fn` uses: its own copy}."""
    own = [_tf_variable(v.values[tower] if isinstance(v, PerTower) else v) for v in variables]
    pairs = zip(variables, own, strict=True)
    return own, {id(v.values[0]): copy for v, copy in pairs if isinstance(v, PerTower)}


def devices_of(variables: Sequence[Any]) -> list[str]:
    """Return where variables, of which none has copies, lie."""
    return [v.device for v in variables_and_copies(variables, 0)[0]]


def _tf_variable(variable: Any) -> tf.Variable:
    if not isinstance(variable, keras.Variable | tf.Variable):
        raise ValueError(
            f"variables must be a list of tf.Variables or keras.Variables, but holds {variable!r}"
        )
    return variable.value if isinstance(variable, keras.Variable) else variable
