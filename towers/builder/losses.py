"""Losses made in the towers: their mean over all examples, and its gradients."""

import itertools
from collections.abc import Callable, Sequence
from typing import Any

import keras
import tensorflow as tf

from towers import tf_internals
from towers.builder import gather
from towers.builder.function_analysis import FunctionAnalysis
from towers.builder.passes import Passes, TowerGradients
from towers.builder.replica_context import ReplicaContext, Replicas, WeightCopies, assign
from towers.builder.sharding import PerTower, Slice, num_rows, rounds
from towers.builder.variable_aggregation import widen
from towers.errors import InputError

_NO_LOSSES = (
    "loss_fn must return one loss for each example, shape [b], not {} for {} examples: reduce all "
    "axes but the first, the builder takes the mean over all towers (a Keras loss: reduction=None)"
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
    loss_fn = tf_internals.converted_as_here(loss_fn)
    masters, copies = _masters_and_copies(variables)
    sums, others, counts = [], [], []

    def forward(replica: ReplicaContext) -> tuple:
        return builder.forward(lambda replica: _losses_of(replica, loss_fn), replica, masters)

    def backward(replica: ReplicaContext) -> list[Any]:
        upstream = _upstream(replica.outputs, replica.part, total)
        return builder.backward(replica, upstream, masters)

    def both(replica: ReplicaContext) -> tuple:
        return replica.compiled(lambda: (forward(replica), backward(replica)))

    def results(replica: ReplicaContext) -> tuple:
        (loss, *rest), gradients = passed[replica.tower]
        others.append((replica.scope, *map(replica.unpadded, rest)))
        return loss, replica.gradients(gradients, masters)

    for slices in rounds(builder, batch, builder.accumulate_steps):
        replicas = Replicas(builder, slices, analysis, {}, analysis.policies, copies)
        with gather.after(sums):
            if slices[0].rows:
                total = slices[0].rows.total
                passed = builder.run(both, replicas)
            else:  # nothing is split: towers have as many examples as they return losses
                there = builder.run(forward, replicas)
                total = sum(replica.scope.count for replica in replicas.contexts)
                passed = list(zip(there, builder.run(backward, replicas), strict=True))
            parts = builder.run(results, replicas)
        counts.append([replica.scope.count for replica in replicas.contexts])
        sums = gather.add_to(builder, sums, parts)  # on each tower
    losses, gradients = map(list, zip(*sums, strict=True))
    counts = list(map(sum, itertools.zip_longest(*counts, fillvalue=0)))
    scopes, outputs, sides = map(list, zip(*others, strict=True))
    analysis.side_outputs.assign(builder.gather(gather.join, sides) if any(sides) else [], batch)
    with tf.name_scope("gather"):
        rows = [[*row, loss] for row, loss in zip(gradients, losses, strict=True)]
        gathered = gather.sum_gradients(builder, rows, masters, bool(copies))
        loss = [row.pop() for row in gathered][0]
        with tf.device(builder.gather_device):
            loss /= tf.cast(total, loss.dtype)
    if passes:
        passes.note(scopes)
        passes.gradients = TowerGradients(counts, [], gradients, gathered, losses)
    assign(builder, scopes, analysis.policies)
    has_none = isinstance(outputs[0], tuple) and not outputs[0]
    return loss, gathered, None if has_none else builder.gather(gather.join, outputs)


def _losses_of(replica: ReplicaContext, loss_fn: Callable) -> tuple[tf.Tensor, tuple]:
    """Call a loss function in a tower; return (losses, (sum, outputs, tensors in attributes)).

    The outputs are () if the function returns losses alone.
    """
    part = replica.part
    returned, side = replica.call(loss_fn)
    losses, outputs = returned if isinstance(returned, tuple) else (returned, ())
    losses = _checked(losses, part)
    total = tf.reduce_sum(losses)
    if part.may_be_empty():
        total = tf.math.multiply_no_nan(total, tf.cast(part.count > 0, total.dtype))
    if part.count is None:
        replica.scope.count = num_rows(losses)
    return losses, (total, outputs, side)


def _upstream(losses: tf.Tensor, part: Slice, total: Any) -> tf.Tensor:
    """Return the gradient of the mean over all `total` examples by a tower's losses, `[b]`."""
    share = 1 / tf.cast(tf.maximum(total, 1), losses.dtype)
    if part.may_be_empty():
        share *= tf.cast(part.count > 0, share.dtype)
    known = losses.shape.is_fully_defined()  # then it is a constant, which costs a GPU nothing
    return tf.fill(losses.shape if known else tf.shape(losses), share)


def _check_by_example(analysis: FunctionAnalysis) -> None:
    """Raise InputError if a loss function's losses or outputs have no row for each example."""
    trace = analysis.trace
    if analysis.by_example is False:
        shape = next(iter(trace.shapes), None)
        raise InputError(_NO_LOSSES.format(shape, trace.size))
    if trace and trace.not_by_example[1:]:
        analysis.check_joinable()


def _checked(losses: Any, part: Slice) -> tf.Tensor:
    losses = tf.convert_to_tensor(losses)
    if not losses.dtype.is_floating:
        raise InputError(
            f"loss_fn must return floating-point losses, not {losses.dtype.name}, which have no "
            "gradients: cast what they are computed from to float32"
        )
    size = part.rows and part.rows.size
    if not losses.shape.is_compatible_with([size if isinstance(size, int) else None]):
        raise InputError(_NO_LOSSES.format(losses.shape, size))
    if tf.is_tensor(size) or (size is not None and losses.shape[0] is None):
        message = _NO_LOSSES.format("another shape", "that many")
        tf.debugging.assert_equal(tf.shape(losses)[0], size, message)
    return widen(losses)


def _masters_and_copies(variables: Sequence[Any]) -> tuple[list[tf.Variable], WeightCopies]:
    """Return the `tf.Variable`s of a builder's variables, of copies the first; and the copies.

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
