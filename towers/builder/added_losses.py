"""Losses that layers add inside a tower, by `add_loss` or an activity regularizer.

A layer in a tower adds the loss of its slice. Here it is scaled, where it is a sum over examples,
to stand for the whole batch: in the mean over all examples, which `gradients` takes, the towers'
values then make the loss of one device. What the layers have added at the end of a tower is
returned beside its outputs, joined, and added to the same layers outside of the towers.
"""

import contextlib
import dataclasses
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import keras
import tensorflow as tf

from towers import tf_internals
from towers.builder.replica_scope import ReplicaScope
from towers.builder.rng import BatchSlice
from towers.builder.variable_aggregation import widen


@dataclasses.dataclass(frozen=True)
class AddedLoss:
    """How the losses that a layer adds for several slices make that of the batch."""

    layer: str  # its path
    # "mean", weighted by examples; "sum"; "rows": a loss for each example, which the function adds
    # to the loss of that example; None: none of these.
    policy: str | None
    by_example: bool  # whether it has a row for each example
    reason: str = ""  # why it could not be tried, if so


@contextlib.contextmanager
def record_losses(
    scope: ReplicaScope, rows: BatchSlice | None, known: Sequence[AddedLoss]
) -> Iterator[None]:
    """Record in a tower's scope what layers add in the block, scaled to stand for the batch."""

    def make(before: Callable) -> Callable:
        def add_loss(layer: keras.Layer, loss: Any) -> None:
            losses = [
                tf.cast(own, keras.config.floatx())
                if tf.is_tensor(own) and not own.dtype.is_floating
                else own
                for own in tf.nest.flatten(loss)
            ]
            if not scope.is_inside():
                for i, own in enumerate(losses):
                    place = len(scope.added)
                    if rows and place < len(known) and known[place].policy == "sum":
                        losses[i] = own / _share(rows, own.dtype)
                    scope.added.append((layer, losses[i]))
            before(layer, losses)

        return add_loss

    with tf_internals.patch_add_loss(make):
        yield


def left_in(scope: ReplicaScope, rows: BatchSlice, known: Sequence[AddedLoss]) -> list[tf.Tensor]:
    """Return the losses that layers have added in a tower as rows, to be joined over the towers.

    A layer that is called again by itself starts anew, as Keras has it. `scope.left` gets the
    layers, and whether a row is one of an example.
    """
    found, kept = [], {id(loss) for loss in scope.losses}
    for place, (layer, loss) in enumerate(scope.added):
        if id(loss) not in kept:
            continue
        of_loss = known[place] if place < len(known) else AddedLoss("", "mean", False)
        wide = widen(loss)
        if of_loss.policy != "rows":
            wide *= _share(rows, wide.dtype)
        found.append(wide if of_loss.by_example else tf.expand_dims(wide, 0))
        scope.left.append((layer, loss.dtype, of_loss.by_example))
    return found


def add_to_layers(scope: ReplicaScope, joined: Sequence[tf.Tensor]) -> None:
    """Add the joined rows of the towers' `left_in` to their layers, outside of the towers."""
    for (layer, dtype, by_example), rows in zip(scope.left, joined, strict=True):
        value = rows if by_example else tf.reduce_sum(rows, axis=0)
        # Functional models refuse `add_loss` of their own.
        keras.Layer.add_loss(layer, tf.cast(value, dtype))


def _share(rows: BatchSlice, dtype: tf.DType) -> tf.Tensor:
    if isinstance(rows.size, int) and isinstance(rows.total, int):
        return tf.constant(rows.size / rows.total, dtype)
    share = tf.cast(rows.size, tf.float64) / tf.cast(rows.total, tf.float64)
    return tf.cast(share, dtype)
