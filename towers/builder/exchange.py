"""Values that towers exchange in the middle of a step, as BatchNorm's moments over all towers.

Towers are traced one after the other, but what they exchange is needed before any of them is done.
So each tower goes on with a stand-in for what it will get; once all towers are traced, the values
are put together on the gather device, once for all, and the result takes the stand-ins' places. No
tower waits in the graph for more than the values themselves.

GPUs, to which a third device is two transfers more, exchange by collectives, and each puts the
values together by itself. What state a GPU reads that lies on another device it gets in the same
way, as one transfer for all.
"""

import dataclasses
import itertools
from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

from towers import tf_private
from towers.builder.collectives import Meeting, are_there
from towers.builder.fetches import Fetches
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
        meet: `meet(value, combine, shape, known)` returns what `combine` makes of the stack
            [N, ...] of all towers' values; its shape must be given. Gradients do not go through it.
            All towers must have the same `known`, if given.
        all_sum: maps a value to the sum of all towers' values. Gradients do not go through it.
        all_gather: maps a value [...] to the stack of all towers' values [N, ...]. Gradients go
            through it: every tower's stack depends on every tower's value.
        count: number of the tower's examples, a tensor if it may be 0.
        fetch: maps a variable to its value, a tensor on the tower's device, or to None where it is
            to be read in TensorFlow's own way.
        num_towers: how many there are.
        equal: whether all towers have the same known number of examples.
        tower: which one this is.
        layers: those of BatchNorm that the tower has gone through so far, on a GPU.
    """

    meet: Callable[..., tf.Tensor]
    all_sum: Callable[[tf.Tensor], tf.Tensor]
    all_gather: Callable[[tf.Tensor], tf.Tensor]
    count: Any = None
    fetch: Callable[[tf.Variable], tf.Tensor | None] | None = None
    num_towers: int = 1
    equal: bool = False
    tower: int = 0
    layers: list = dataclasses.field(default_factory=list)


@dataclasses.dataclass(frozen=True)
class _Round:
    """One exchange: what is made of the list of the towers' values, these, and what stands in."""

    combine: Callable
    together: Meeting | None
    values: list[tf.Tensor] = dataclasses.field(default_factory=list)
    known: list[Any] = dataclasses.field(default_factory=list)
    stand_ins: list[tf.Tensor] = dataclasses.field(default_factory=list)


@tf.custom_gradient
def _once_differentiated(result: tf.Tensor, value: tf.Tensor) -> tuple[tf.Tensor, Callable]:
    """Return what is made of all towers' values; a gradient by this tower's is refused."""

    def gradient(_: tf.Tensor) -> tuple:
        raise InputError(_SECOND)

    return tf.identity(result), gradient


class Exchange:
    """The exchanges of one step's towers.

    The first call of a tower meets the first of each other tower, and so on: all must make the same
    calls in the same order, as copies of one function do.
    """

    def __init__(self, counts: Sequence[Any], devices: Sequence[str]):
        """Set the towers' devices and for each the number of examples, None if it is not known."""
        self.counts, self._devices = list(counts), list(devices)
        self.num_towers = len(self.counts)
        self._by_collectives = are_there(devices)
        self._fetches = [Fetches(device, tf.compat.v1.get_default_graph()) for device in devices]
        self._equal = all(isinstance(c, int) and c == counts[0] for c in counts)
        self._graph = tf.compat.v1.get_default_graph()
        self._rounds: list[_Round] = []
        self._num_joined = 0  # of these
        self.is_open = True  # to more, while towers are traced

    def member(self, tower: int) -> Member:
        """Return the part of tower number `tower`."""
        places = itertools.count()

        def exchanged(
            value: tf.Tensor,
            shape: Sequence[int],
            of_list: Callable,
            by_meeting: Callable,
            known: Any = None,
        ) -> tf.Tensor:
            self._check()
            place = next(places)
            if place == len(self._rounds):
                together = Meeting(self._devices) if self._by_collectives else None
                self._rounds.append(_Round(of_list, together))
            own = self._rounds[place]
            own.values.append(value)
            own.known.append(known)
            if own.together:
                result = by_meeting(own.together)
            else:
                result = tf.identity(tf.zeros(shape, value.dtype))
                own.stand_ins.append(result)
            return _once_differentiated(result, value)

        def meet(
            value: tf.Tensor, combine: Callable, shape: Sequence[int], known: Any = None
        ) -> tf.Tensor:
            return exchanged(
                value,
                shape,
                lambda values: combine(tf.stack(values)),
                lambda meeting: combine(meeting.stack(value, self._devices[tower])),
                known,
            )

        def all_sum(value: tf.Tensor) -> tf.Tensor:
            by_meeting = lambda meeting: meeting.sum(value, self._devices[tower])  # noqa: E731
            return exchanged(value, value.shape, tf.add_n, by_meeting)

        @tf.custom_gradient
        def all_gather(value: tf.Tensor) -> tuple[tf.Tensor, Callable]:
            stacked = [self.num_towers, *value.shape]

            def gradient(upstream: tf.Tensor) -> tf.Tensor:
                with tf.name_scope(SCOPE):
                    return all_sum(upstream)[tower]

            return meet(value, tf.identity, stacked), gradient

        fetch, count = self._fetches[tower].fetch, self.counts[tower]
        return Member(
            meet, all_sum, all_gather, count, fetch, self.num_towers, self._equal, tower
        )

    def _check(self) -> None:
        """Refuse to exchange where not all towers come."""
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

    def join(self, gather_device: str) -> None:
        """Put what was exchanged in the place of the stand-ins, when all towers are traced.

        Raises:
            ValueError: the towers made different calls.
        """
        for own in self._rounds[self._num_joined :]:
            pairs = zip(own.values, own.known, strict=True)
            shapes = {(value.dtype, tuple(value.shape), known) for value, known in pairs}
            if len(own.values) != self.num_towers or len(shapes) > 1:
                raise InputError(
                    f"{len(own.values)} of {self.num_towers} towers met with values of "
                    f"{len(shapes)} shapes: each copy of the function must run the same layers"
                )
            if own.stand_ins:
                with tf.device(gather_device), tf.name_scope(SCOPE):
                    everything = own.combine(own.values)
                for stand_in in own.stand_ins:
                    tf_private.set_input(stand_in.op, everything)
        for fetches in self._fetches:
            fetches.join()
        self._num_joined, self.is_open = len(self._rounds), False
