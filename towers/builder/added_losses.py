"""Losses that layers add inside a tower, by `add_loss` or an activity regularizer.

A layer in a tower adds the loss of its slice. A loss that is a sum over examples is scaled to the
whole batch, so that the mean over all towers' examples, as in `gradients`, is the loss of one
device. `concat` returns the added losses beside the outputs, joins them, and adds them to the same
layers outside of the towers.

Policies, by ("loss", place): "mean", weighted by examples; "sum"; "rows": a loss for each example,
which the function adds to that example's loss; None: neither.
"""

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import keras
import tensorflow as tf

from towers import tf_internals
from towers.builder.replica_scope import ReplicaScope
from towers.builder.rng import BatchSlice
from towers.builder.variable_aggregation import widen


@contextlib.contextmanager
def record_losses(
    scope: ReplicaScope, rows: BatchSlice | None, policies: Mapping[Any, str | None]
) -> Iterator[None]:
    """Record the losses that layers add in the block; scale those that are sums to the batch.

    Args:
        scope: gets the losses, in `added`.
        rows: the tower's slice; None if the batch is not split.
        policies: of the losses, in the order in which they are added.
    """

    def make(before: Callable) -> Callable:
        def add_loss(layer: keras.Layer, loss: Any) -> None:
            losses = list(map(as_float, tf.nest.flatten(loss)))
            if not scope.is_inside():
                for i, value in enumerate(losses):
                    if rows and policies.get(("loss", len(scope.added))) == "sum":
                        losses[i] = value / _share(rows, value.dtype)
                    scope.added.append((layer, losses[i]))
            before(layer, losses)

        return add_loss

    with tf_internals.replaced((keras.Layer, "add_loss", make)):
        yield


def as_float(loss: Any) -> tf.Tensor:
    """Return a loss as a tensor of floats."""
    loss = tf.convert_to_tensor(loss)
    return loss if loss.dtype.is_floating else tf.cast(loss, keras.config.floatx())


def as_rows(
    scope: ReplicaScope, rows: BatchSlice, policies: Mapping[Any, str | None]
) -> list[tf.Tensor]:
    """Return the losses that layers have added in a tower as rows, to be joined over the towers.

    A layer that is called again by itself drops its earlier losses, as in Keras.

    Args:
        scope: has recorded the losses; its `loss_rows` are set.
        rows: the tower's slice.
        policies: as for `record_losses`.
    """
    added_rows, current = [], {id(loss) for loss in scope.losses}
    for place, (layer, loss) in enumerate(scope.added):
        if id(loss) not in current:
            continue
        wide, by_example = widen(loss), bool(loss.shape.rank)
        if policies.get(("loss", place)) != "rows":
            wide *= _share(rows, wide.dtype)
        added_rows.append(wide if by_example else tf.expand_dims(wide, 0))
        scope.loss_rows.append((layer, loss.dtype, by_example))
    return added_rows


def add_to_layers(scope: ReplicaScope, joined: Sequence[tf.Tensor]) -> None:
    """Add the losses of the whole batch to their layers, outside of the towers.

    Args:
        scope: of the first tower, for which `as_rows` was called.
        joined: the rows that `as_rows` returned, joined over the towers.
    """
    for (layer, dtype, by_example), rows in zip(scope.loss_rows, joined, strict=True):
        value = rows if by_example else tf.reduce_sum(rows, axis=0)
        # Functional models refuse `add_loss` of their own.
        keras.Layer.add_loss(layer, tf.cast(value, dtype))


def _share(rows: BatchSlice, dtype: tf.DType) -> tf.Tensor:
    if isinstance(rows.size, int) and isinstance(rows.total, int):
        return tf.constant(rows.size / rows.total, dtype)
    share = tf.cast(rows.size, tf.float64) / tf.cast(rows.total, tf.float64)
    return tf.cast(share, dtype)
