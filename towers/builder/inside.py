"""What stands in the place of Keras' and TensorFlow's own ways inside of a tower."""

import contextlib
from collections.abc import Iterator
from typing import Any

import tensorflow as tf

from towers import tf_private
from towers.builder import batch_norm
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
        scope = stack.enter_context(TowerScope(copies, device))
        stack.enter_context(batch_norm.over_all_towers(member, moments))
        stack.enter_context(tf_private.functions_inlined())
        if copies is not None:
            stack.enter_context(tf.variable_creator_scope(refuse_variable))
            stack.enter_context(assignments_refused())
        yield scope
