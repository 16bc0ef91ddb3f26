"""What stands in the place of Keras' and TensorFlow's own ways inside of a tower."""

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import Any

import tensorflow as tf

from towers import tf_private
from towers.builder import batch_norm, convolution, kinds, xla
from towers.builder.assignments import TowerScope, assignments_refused, refuse_variable
from towers.builder.exchange import Member


@contextlib.contextmanager
def inside_of_tower(
    device: str, member: Member | None, moments: str, copies: dict[int, Any] | None = None
) -> Iterator[TowerScope]:
    """Let what is called in the block be of one tower among several; yield what it assigns.

    Args:
        device: of the tower.
        member: its part in the exchanges; None if there is one tower.
        moments: of BatchNorm layers: "sync" or "local".
        copies: {id of a variable: what the tower reads in its place}; None if what is called may
            make variables, and assign any, of its own.
    """
    with contextlib.ExitStack() as stack:
        fetch = member.fetch if member else None
        scope = stack.enter_context(TowerScope(copies, device, fetch=fetch))
        stack.enter_context(batch_norm.over_all_towers(member, moments, device))
        stack.enter_context(convolution.kernels_by_products(device))
        stack.enter_context(tf_private.functions_inlined(xla.read_outside))
        stack.enter_context(integers_on(device))
        if copies is not None:
            stack.enter_context(tf.variable_creator_scope(refuse_variable))
            stack.enter_context(assignments_refused())
        yield scope


def integers_on(device: str) -> contextlib.AbstractContextManager:
    """Let Keras' ops take int64 where a GPU is given int32, which it has the host work on."""
    if not kinds.is_gpu(device):
        return contextlib.nullcontext()
    return tf_private.ops_of_integers_replaced(lambda name: functools.partial(_by_int64, name))


def _by_int64(name: str, own: Callable) -> Callable:
    def wide(value: Any) -> Any:
        if not tf.is_tensor(value) or value.shape.rank == 0:  # single ones are of shapes: the host
            return value
        if name == "signbit" and value.dtype.is_floating:  # which Keras takes of an int32, too
            value = tf.bitcast(tf.cast(value, tf.float32), tf.int32)
        return tf.cast(value, tf.int64) if value.dtype == tf.int32 else value

    def call(*args: Any, **kwargs: Any) -> Any:
        return own(*map(wide, args), **kwargs)

    return call
