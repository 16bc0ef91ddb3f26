"""Values that towers exchange in the middle of a step, as BatchNorm's moments over all towers.

Towers are traced one after the other, but what they exchange is needed before any of them is done.
So each tower goes on with a stand-in for what it will get; once all towers are traced, the values
are put together on the gather device, once for all, and the result takes the stand-ins' places. No
tower waits in the graph for more than the values themselves.
"""

import itertools
from collections.abc import Callable, Sequence

import tensorflow as tf

from towers import tf_private
from towers.errors import InputError

SCOPE = "exchange"  # of what differs between towers in a graph, as their places do


class Exchange:
    """The exchanges of one step's towers.

    The first call of a tower meets the first of each other tower, and so on: all must make the same
    calls in the same order, as copies of one function do.
    """

    def __init__(self, num_towers: int):
        """Set how many towers take part."""
        self.num_towers = num_towers
        self.graph = tf.compat.v1.get_default_graph()
        # Of each: how values are combined, these, and what stands in for the result.
        self.meetings: list[tuple[Callable, list[tf.Tensor], list[tf.Tensor]]] = []

    def member(self, tower: int) -> "Member":
        """Return the part of tower number `tower`."""
        return Member(self, tower)

    def join(self, gather_device: str) -> None:
        """Put what was exchanged in the place of the stand-ins, when all towers are traced.

        Raises:
            ValueError: the towers made different calls.
        """
        for combine, values, stand_ins in self.meetings:
            shapes = {(value.dtype, tuple(value.shape)) for value in values}
            if len(values) != self.num_towers or len(shapes) > 1:
                raise InputError(
                    f"{len(values)} of {self.num_towers} towers met with values of "
                    f"{len(shapes)} shapes: each copy of the function must run the same layers"
                )
            with tf.device(gather_device), tf.name_scope(SCOPE):
                everything = combine(values)
            for stand_in in stand_ins:
                tf_private.set_input(stand_in.op, everything)


class Member:
    """A tower's part in the exchanges of a step."""

    def __init__(self, exchange: Exchange, tower: int):
        """Set which tower takes part in what."""
        self.exchange, self.tower = exchange, tower
        self._places = itertools.count()

    def meet(self, value: tf.Tensor, combine: Callable, shape: Sequence[int]) -> tf.Tensor:
        """Return what `combine` makes of all towers' values, a list in tower order.

        Its shape must be given. Gradients do not go through it.
        """
        if tf.executing_eagerly():
            raise InputError(
                "towers that run one after the other cannot wait for each other: make a "
                "tf.function of the step, or leave BatchNorm local (batch_norm='local')"
            )
        if tf.compat.v1.get_default_graph() is not self.exchange.graph:
            raise InputError(
                "a BatchNorm layer inside of a branch or a loop cannot take its moments over "
                "all towers there: leave BatchNorm local (batch_norm='local'), or call the "
                "layer outside of it"
            )
        place, meetings = next(self._places), self.exchange.meetings
        if place == len(meetings):
            meetings.append((combine, [], []))
        stand_in = tf.identity(tf.zeros(shape, value.dtype))
        _, values, stand_ins = meetings[place]
        values.append(value)
        stand_ins.append(stand_in)
        return stand_in

    def all_gather(self, value: tf.Tensor) -> tf.Tensor:
        """Return the stack of all towers' values, each [...]: [N, ...].

        Gradients go through it: every tower's stack depends on every tower's value.
        """
        stacked = [self.exchange.num_towers, *value.shape]

        @tf.custom_gradient
        def gather(value: tf.Tensor) -> tuple[tf.Tensor, Callable]:
            def gradient(upstream: tf.Tensor) -> tf.Tensor:
                with tf.name_scope(SCOPE):
                    return self.meet(upstream, tf.add_n, stacked)[self.tower]

            return self.meet(value, tf.stack, stacked), gradient

        return gather(value)
