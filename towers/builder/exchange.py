"""Values that towers exchange in the middle of a step, as BatchNorm's moments over all towers.

Towers are traced one after the other, but what they exchange is needed before any of them is done.
So each tower goes on with a stand-in for what it will get; once all towers are traced, the values
are put together on the gather device, once for all, and the result takes the stand-ins' places. No
tower waits in the graph for more than the values themselves.
"""

import dataclasses
import itertools
from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

from towers import tf_private
from towers.errors import InputError

_SECOND = (
    "the gradient of a gradient goes through BatchNorm over all towers, which cannot wait for each "
    "other a third time: leave BatchNorm local (batch_norm='local'), or take another normalisation "
    "(GroupNormalization, LayerNormalization)"
)

SCOPE = "exchange"  # of what differs between towers in a graph, as their places do


@dataclasses.dataclass(frozen=True)
class Member:
    """A tower's part in the exchanges of a step.

    Attributes:
        meet: `meet(value, combine, shape)` returns what `combine` makes of all towers' values, a
            list in tower order; its shape must be given. Gradients do not go through it.
        all_gather: maps a value [...] to the stack of all towers' values [N, ...]. Gradients go
            through it: every tower's stack depends on every tower's value.
        count: number of the tower's examples, a tensor if it may be 0.
    """

    meet: Callable[[tf.Tensor, Callable, Sequence[int]], tf.Tensor]
    all_gather: Callable[[tf.Tensor], tf.Tensor]
    count: Any = None


@dataclasses.dataclass(frozen=True)
class _Meeting:
    """One exchange: what is made of the towers' values, these, and what stands in for it."""

    combine: Callable
    values: list[tf.Tensor] = dataclasses.field(default_factory=list)
    stand_ins: list[tf.Tensor] = dataclasses.field(default_factory=list)


@tf.custom_gradient
def _once_differentiated(stand_in: tf.Tensor, value: tf.Tensor) -> tuple[tf.Tensor, Callable]:
    """Return what stands in for all towers' values; a gradient by this tower's is refused."""

    def gradient(_: tf.Tensor) -> tuple:
        raise InputError(_SECOND)

    return tf.identity(stand_in), gradient


class Exchange:
    """The exchanges of one step's towers.

    The first call of a tower meets the first of each other tower, and so on: all must make the same
    calls in the same order, as copies of one function do.
    """

    def __init__(self, num_towers: int):
        """Set how many towers take part."""
        self.num_towers = num_towers
        self._graph = tf.compat.v1.get_default_graph()
        self._meetings: list[_Meeting] = []
        self._num_joined = 0  # of these
        self.is_open = True  # to more, while towers are traced

    def member(self, tower: int, count: Any = None) -> Member:
        """Return the part of tower number `tower`, which has `count` examples."""
        places = itertools.count()

        def meet(value: tf.Tensor, combine: Callable, shape: Sequence[int]) -> tf.Tensor:
            if tf.executing_eagerly():
                raise InputError(
                    "towers that run one after the other cannot wait for each other: make a "
                    "tf.function of the step, or leave BatchNorm local (batch_norm='local')"
                )
            if not self.is_open:
                raise InputError(_SECOND)
            if tf.compat.v1.get_default_graph() is not self._graph:
                raise InputError(
                    "a BatchNorm layer inside of a branch or a loop cannot take its moments over "
                    "all towers there: leave BatchNorm local (batch_norm='local'), or call the "
                    "layer outside of it"
                )
            place = next(places)
            if place == len(self._meetings):
                self._meetings.append(_Meeting(combine))
            stand_in = tf.identity(tf.zeros(shape, value.dtype))
            self._meetings[place].values.append(value)
            self._meetings[place].stand_ins.append(stand_in)
            return _once_differentiated(stand_in, value)

        @tf.custom_gradient
        def all_gather(value: tf.Tensor) -> tuple[tf.Tensor, Callable]:
            stacked = [self.num_towers, *value.shape]

            def gradient(upstream: tf.Tensor) -> tf.Tensor:
                with tf.name_scope(SCOPE):
                    return meet(upstream, tf.add_n, stacked)[tower]

            return meet(value, tf.stack, stacked), gradient

        return Member(meet, all_gather, count)

    def join(self, gather_device: str) -> None:
        """Put what was exchanged in the place of the stand-ins, when all towers are traced.

        Raises:
            ValueError: the towers made different calls.
        """
        for meeting in self._meetings[self._num_joined :]:
            shapes = {(value.dtype, tuple(value.shape)) for value in meeting.values}
            if len(meeting.values) != self.num_towers or len(shapes) > 1:
                raise InputError(
                    f"{len(meeting.values)} of {self.num_towers} towers met with values of "
                    f"{len(shapes)} shapes: each copy of the function must run the same layers"
                )
            with tf.device(gather_device), tf.name_scope(SCOPE):
                everything = meeting.combine(meeting.values)
            for stand_in in meeting.stand_ins:
                tf_private.set_input(stand_in.op, everything)
        self._num_joined, self.is_open = len(self._meetings), False
