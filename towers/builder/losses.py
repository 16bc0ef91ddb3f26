"""Losses made in the towers: their mean over all examples, and its gradients."""

from collections.abc import Callable, Sequence
from typing import Any

import keras
import tensorflow as tf

from towers import tf_internals
from towers.builder import gather
from towers.builder.function_analysis import FunctionAnalysis
from towers.builder.passes import Passes, TowerGradients
from towers.builder.replica_context import ReplicaContext, Replicas, WeightCopies, assign
from towers.builder.sharding import PerTower, Slice, rounds
from towers.builder.variable_aggregation import widen
from towers.errors import InputError

_NO_LOSSES = (
    "loss_fn must return one loss for each example, shape [b], not {}: reduce all axes but the "
    "first, the builder takes the mean over all towers (a Keras loss: reduction=None)"
)


def mean_gradients(
    builder: Any,
    loss_fn: Callable,
    variables: Sequence[Any],
    batch: Sequence[Any],
    passes: Passes | None = None,
) -> tuple[tf.Tensor, list[list[Any]], Any]:
    """Return the mean loss, its gradients, and joined outputs.

    Each tower goes back from the mean over all examples: its gradients are only added up.

    Args:
        builder: the `TowerBuilder`.
        loss_fn: as for `TowerBuilder.gradients`; outputs are None if it returns losses alone.
        variables: as for `TowerBuilder.gradients`; if some are copied, there is a list of gradients
            for each tower, else one.
        batch: the arguments of `loss_fn`.
        passes: gets a record of the passes, if given.
    """
    _check_by_example(analysis := builder.analyze(loss_fn, *batch))
    loss_fn, (masters, copies) = _of_examples(loss_fn), _masters_and_copies(variables)
    sums, others = [], []

    def forward(replica: ReplicaContext) -> tuple:
        return builder.forward(loss_fn, replica, masters)

    def backward(replica: ReplicaContext) -> list[Any]:
        upstream = _upstream(replica.outputs, replica.part, total)
        return builder.backward(replica, upstream, masters)

    def both(replica: ReplicaContext) -> tuple:
        return replica.compiled(lambda: (forward(replica), backward(replica)))

    def results(replica: ReplicaContext) -> tuple:
        (loss, count, *rest), gradients = passed[replica.tower]
        others.append((replica.close(count), *map(replica.unpadded, rest)))
        return loss, replica.scope.count, replica.gradients(gradients, masters)

    for slices in rounds(builder, batch):  # `accumulate_steps` rounds
        replicas = Replicas(builder, slices, analysis, {}, analysis.policies, copies)
        with gather.after(sums):
            if slices[0].rows:
                total = slices[0].rows.total
                passed = builder.run(both, replicas)
            else:  # nothing is split: towers have as many examples as they return losses
                there = builder.run(forward, replicas)
                total = builder.gather(builder.add, [count for _, count, *_ in there])
                passed = list(zip(there, builder.run(backward, replicas), strict=True))
            parts = builder.run(results, replicas)
        sums = gather.add_to(sums, parts, gather.plan_of(builder))  # on each tower
    losses, counts, gradients = map(list, zip(*sums, strict=True))
    scopes, outputs, sides = map(list, zip(*others, strict=True))
    analysis.side_outputs.assign(builder.gather(gather.join, sides) if any(sides) else [], batch)
    with tf.name_scope("gather"):
        rows = [[*row, loss] for row, loss in zip(gradients, losses, strict=True)]
        gathered = gather.sum_gradients(rows, gather.plan_of(builder, masters), bool(copies))
        loss = [row.pop() for row in gathered][0]
        with tf.device(builder.gather_device):
            loss /= tf.cast(total, loss.dtype)
    if passes:
        passes.note(scopes)
        passes.gradients = TowerGradients(counts, [], gradients, gathered, losses)
    assign(builder, scopes, analysis.policies)
    has_none = isinstance(outputs[0], tuple) and not outputs[0]
    return loss, gathered, None if has_none else builder.gather(gather.join, outputs)


def _of_examples(loss_fn: Callable) -> Callable:
    """Return a function for `TowerBuilder.forward`: from a replica to (losses, what it returns).

    It returns the sum of the losses, the number of examples, the outputs of `loss_fn` (() if there
    are none), and the tensors that are set as attributes.

    Args:
        loss_fn: as for `TowerBuilder.gradients`.
    """
    loss_fn = tf_internals.converted_as_here(loss_fn)

    def losses_of(replica: Any) -> tuple[tf.Tensor, tuple]:
        part = replica.part
        returned, side = replica.call(loss_fn)
        losses, outputs = returned if isinstance(returned, tuple) else (returned, ())
        losses = _checked(losses, part)
        total = tf.reduce_sum(losses)
        if part.may_be_empty():
            total = tf.math.multiply_no_nan(total, tf.cast(part.count > 0, total.dtype))
        count = losses.shape[0] if part.count is None else part.count
        if not isinstance(count, int):
            count = tf.cast(tf.shape(losses)[0] if count is None else count, total.dtype)
        return losses, (total, count, outputs, side)

    return lambda replica: replica.compiled(lambda: losses_of(replica))


def _upstream(losses: tf.Tensor, part: Slice, total: Any) -> tf.Tensor:
    """Return the gradient of the mean over all examples by a tower's losses.

    Args:
        losses: of the tower, `[b]`.
        part: the tower's slice.
        total: number of examples of all towers, an int or a scalar.
    """
    share = 1 / tf.cast(tf.maximum(total, 1), losses.dtype)
    if part.may_be_empty():
        share *= tf.cast(part.count > 0, share.dtype)
    known = losses.shape.is_fully_defined()  # then it is a constant, which costs a GPU nothing
    return tf.fill(losses.shape if known else tf.shape(losses), share)


def _check_by_example(analysis: FunctionAnalysis) -> None:
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


def _masters_and_copies(variables: Sequence[Any]) -> tuple[list[tf.Variable], WeightCopies]:
    """Return the `tf.Variable`s of a builder's variables, of copies the first; and the copies.

    Args:
        variables: as for `TowerBuilder.gradients`.

    Raises:
        ValueError: there is something else among them.
    """

    def value_of(variable: Any) -> tf.Variable:
        if not isinstance(variable, keras.Variable | tf.Variable):
            raise ValueError(
                "variables must be a list of tf.Variables or keras.Variables, but holds "
                f"{variable!r}"
            )
        return variable.value if isinstance(variable, keras.Variable) else variable

    copied = [v.values for v in variables if isinstance(v, PerTower)]
    copies = [(values[0], list(map(value_of, values))) for values in copied]
    return [value_of(v.values[0] if isinstance(v, PerTower) else v) for v in variables], copies
