"""Values that towers exchange in the middle of a step, as BatchNorm's moments over all towers.

Each tower gets the stack of all towers' values. Towers are traced one after the other, so a tower
is traced before the others' values exist. It goes on with a stand-in for the stack; once all towers
are traced, the values are stacked on the gather device, and the result replaces the stand-ins. In
the graph a tower waits for these values alone.

GPUs exchange by collectives: a gather device would cost two more transfers.
"""

import dataclasses
import itertools
from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

from towers import tf_internals
from towers.builder.collectives import Collective, are_used
from towers.errors import InputError

_HERE = (
    "BatchNorm cannot take its moments over all towers here: that needs a tf.function of the whole "
    "step, and layers outside of branches, loops, tf.vectorized_map and jit_compile; or set "
    "batch_norm='local' (--batch_norm=local), and no layer's synchronized=True"
)
_SECOND = (
    "a gradient goes through BatchNorm over all towers where these do not meet again: the gradient "
    "of a gradient, one by tf.gradients, or by a tape outside of a loop or branch with the towers: "
    "open the tape inside of it, or set batch_norm='local'"
)


@dataclasses.dataclass(frozen=True)
class _Round:
    """One exchange of all towers' values."""

    collective: Collective | None
    values: list[tf.Tensor] = dataclasses.field(default_factory=list)
    known: list[Any] = dataclasses.field(default_factory=list)
    stand_ins: list[tf.Tensor] = dataclasses.field(default_factory=list)


class SyncGroup:
    """The exchanges of one step's towers.

    A tower's first exchange is with the first one of each other tower, and so on: all must make the
    same in the same order, as copies of one function do.
    """

    def __init__(self, counts: Sequence[Any], devices: Sequence[str]):
        """Set the towers.

        Args:
            counts: numbers of examples: ints, tensors if 0 is possible, or None if unknown.
            devices: of the towers.
        """
        self.is_open = True  # while towers are traced
        self.handles = [SyncHandle(self, i, counts, device) for i, device in enumerate(devices)]
        self._devices, self._by_collectives = devices, are_used(devices)
        self._graph = tf.compat.v1.get_default_graph()
        self._rounds: list[_Round] = []
        self._num_joined = 0  # of these

    def round(self, place: int) -> _Round:
        """Return the exchange of a number, which the first tower to arrive begins.

        Raises:
            InputError: towers cannot exchange here.
        """
        if not self.is_open:
            raise InputError(_SECOND)
        # tf.vectorized_map traces what it calls in place, in a scope of this name.
        in_map = "loop_body" in tf.get_current_name_scope().split("/")
        here = tf.compat.v1.get_default_graph()
        if tf.executing_eagerly() or in_map or here is not self._graph:
            raise InputError(_HERE)
        if place == len(self._rounds):
            self._rounds.append(_Round(Collective(self._devices) if self._by_collectives else None))
        return self._rounds[place]

    def join(self, gather_device: str) -> None:
        """Replace the stand-ins by the stacks, when all towers are traced.

        Raises:
            InputError: the towers made different calls.
        """
        for exchange in self._rounds[self._num_joined :]:
            pairs = zip(exchange.values, exchange.known, strict=True)
            shapes = {(value.dtype, tuple(value.shape), known) for value, known in pairs}
            if len(exchange.values) != len(self.handles) or len(shapes) > 1:
                raise InputError(
                    f"{len(exchange.values)} of {len(self.handles)} towers met with values of "
                    f"{len(shapes)} shapes: each copy of the function must run the same layers"
                )
            if exchange.stand_ins:
                with tf.device(gather_device), tf.name_scope("exchange"):
                    stacked = tf.stack(exchange.values)
                for stand_in in exchange.stand_ins:
                    tf_internals.set_input(stand_in.op, stacked)
        self._num_joined, self.is_open = len(self._rounds), False


class SyncHandle:
    """The exchanges of one tower."""

    def __init__(self, group: SyncGroup, tower: int, counts: Sequence[Any], device: str):
        """Join a group, see `SyncGroup`."""
        self.tower, self.num_towers, self.count = tower, len(counts), counts[tower]
        self.equal = all(isinstance(c, int) and c == counts[0] for c in counts)
        self.layers: list[Any] = []  # of BatchNorm, that the tower has gone through
        self._group, self._device, self._places = group, device, itertools.count()

    def stack(self, value: tf.Tensor, known: Any = None) -> tf.Tensor:
        """Return the stack of all towers' values, `[N, ...]`, which has no gradient.

        Args:
            value: of this tower.
            known: a Python value that must be equal in all towers.

        Raises:
            InputError: the towers cannot exchange here; or, later, the result is differentiated, or
                towers differ in shape, dtype or `known`.
        """
        exchange = self._group.round(next(self._places))
        exchange.values.append(value)
        exchange.known.append(known)
        if exchange.collective:
            result = exchange.collective.stack(value, self._device)
        else:
            result = tf.identity(tf.zeros([self.num_towers, *value.shape], value.dtype))
            exchange.stand_ins.append(result)
        return _once_differentiated(result, value)

    def all_gather(self, value: tf.Tensor) -> tf.Tensor:
        """Return the stack of all towers' values, `[N, ...]`, with gradients to each tower."""

        @tf.custom_gradient
        def gathered(value: tf.Tensor) -> tuple[tf.Tensor, Callable]:
            def gradient(upstream: tf.Tensor) -> tf.Tensor:
                return tf.reduce_sum(self.stack(upstream)[:, self.tower], axis=0)

            return self.stack(value), gradient

        return gathered(value)


@tf.custom_gradient
def _once_differentiated(result: tf.Tensor, value: tf.Tensor) -> tuple[tf.Tensor, Callable]:
    def gradient(_: tf.Tensor) -> tuple:
        raise InputError(_SECOND)

    return tf.identity(result), gradient
