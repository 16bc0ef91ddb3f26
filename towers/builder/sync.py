"""Values that towers exchange in the middle of a step, as BatchNorm's moments over all towers.

Towers are traced one after the other, so a tower is traced before the others' values exist. It goes
on with a stand-in for the result; once all towers are traced, the values are combined on the gather
device, and the result replaces the stand-ins. In the graph a tower waits for these values alone.

GPUs exchange by collectives, and each combines the values: a gather device would cost two more
transfers.
"""

import dataclasses
import itertools
from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

from towers import tf_internals
from towers.builder.collectives import Collective, are_used
from towers.builder.cross_host import VariablePrefetch
from towers.errors import InputError

_SECOND = (
    "a gradient goes through BatchNorm over all towers where these do not meet again: the gradient "
    "of a gradient, one by tf.gradients, or by a tape outside of a loop or branch with the towers: "
    "open the tape inside of it, leave BatchNorm local (batch_norm='local'), or take another "
    "normalisation (GroupNormalization, LayerNormalization)"
)
SCOPE = "exchange"  # name scope of ops that differ between towers


@dataclasses.dataclass(frozen=True)
class _Round:
    """One exchange of all towers' values."""

    combine: Callable  # maps the list of values to the result
    collective: Collective | None
    values: list[tf.Tensor] = dataclasses.field(default_factory=list)
    known: list[Any] = dataclasses.field(default_factory=list)
    stand_ins: list[tf.Tensor] = dataclasses.field(default_factory=list)


class SyncGroup:
    """The exchanges of one step's towers.

    A tower's first call combines with the first call of each other tower, and so on: all must make
    the same calls in the same order, as copies of one function do.
    """

    def __init__(self, counts: Sequence[Any], devices: Sequence[str]):
        """Set the towers.

        Args:
            counts: numbers of examples: ints, tensors if 0 is possible, or None if unknown.
            devices: of the towers.
        """
        self.counts, self.devices, self.num_towers = list(counts), list(devices), len(counts)
        self.equal = all(isinstance(c, int) and c == counts[0] for c in counts)
        self.is_open = True  # while towers are traced
        self._by_collectives = are_used(devices)
        self._prefetches = [VariablePrefetch(device) for device in devices]
        self._graph = tf.compat.v1.get_default_graph()
        self._rounds: list[_Round] = []
        self._num_joined = 0  # of these

    def handle(self, tower: int, by_xla: bool = False) -> "SyncHandle":
        """Return a tower's handle.

        Args:
            tower: number of the tower.
            by_xla: whether XLA compiles the tower, which can then exchange nothing.
        """
        return SyncHandle(self, tower, by_xla, self._prefetches[tower].prefetch)

    def round(self, place: int, combine: Callable) -> _Round:
        """Return one exchange, which the first tower to arrive begins.

        Args:
            place: number of the exchange.
            combine: maps the list of towers' values to the result.

        Raises:
            InputError: towers cannot exchange here.
        """
        if tf.executing_eagerly():
            raise InputError(
                "towers that run one after the other cannot wait for each other: make a "
                "tf.function of the step, or leave BatchNorm local (batch_norm='local')"
            )
        if not self.is_open:
            raise InputError(_SECOND)
        # tf.vectorized_map traces what it calls in place, in a scope of this name.
        in_map = "loop_body" in tf.get_current_name_scope().split("/")
        if in_map or tf.compat.v1.get_default_graph() is not self._graph:
            raise InputError(
                "a BatchNorm layer inside of a branch, a loop or tf.vectorized_map cannot take its "
                "moments over all towers: leave BatchNorm local (batch_norm='local'), or call the "
                "layer outside of it"
            )
        if place == len(self._rounds):
            collective = Collective(self.devices) if self._by_collectives else None
            self._rounds.append(_Round(combine, collective))
        return self._rounds[place]

    def join(self, gather_device: str) -> None:
        """Replace the stand-ins by the results, when all towers are traced.

        Raises:
            InputError: the towers made different calls.
        """
        for exchange in self._rounds[self._num_joined :]:
            pairs = zip(exchange.values, exchange.known, strict=True)
            shapes = {(value.dtype, tuple(value.shape), known) for value, known in pairs}
            if len(exchange.values) != self.num_towers or len(shapes) > 1:
                raise InputError(
                    f"{len(exchange.values)} of {self.num_towers} towers met with values of "
                    f"{len(shapes)} shapes: each copy of the function must run the same layers"
                )
            if exchange.stand_ins:
                with tf.device(gather_device), tf.name_scope(SCOPE):
                    everything = exchange.combine(exchange.values)
                for stand_in in exchange.stand_ins:
                    tf_internals.set_input(stand_in.op, everything)
        for prefetches in self._prefetches:
            prefetches.join()
        self._num_joined, self.is_open = len(self._rounds), False


class SyncHandle:
    """The exchanges of one tower."""

    def __init__(self, group: SyncGroup, tower: int, by_xla: bool, prefetch: Callable):
        """Join a group.

        Args:
            group: of the towers.
            tower: number of this one.
            by_xla: whether it is compiled.
            prefetch: returns the value of a variable on the tower's device.
        """
        self.count, self.num_towers, self.equal = group.counts[tower], group.num_towers, group.equal
        self.tower, self.by_xla, self.prefetch = tower, by_xla, prefetch
        self.layers: list[Any] = []  # of BatchNorm, that the tower has gone through, on a GPU
        self._group, self._device = group, group.devices[tower]
        self._places = itertools.count()

    def all_reduce(
        self, value: tf.Tensor, combine: Callable, shape: Sequence[int], known: Any = None
    ) -> tf.Tensor:
        """Return `combine(stack)` of all towers' values, stacked to `[N, ...]`.

        Args:
            value: of this tower.
            combine: maps the stack to the result.
            shape: of the result.
            known: a Python value that must be equal in all towers.

        Raises:
            InputError: the towers cannot exchange here; or, later, the result is differentiated, or
                towers differ in shape, dtype or `known`.
        """
        return self._exchanged(
            value,
            shape,
            lambda values: combine(tf.stack(values)),
            lambda collective: combine(collective.stack(value, self._device)),
            known,
        )

    def all_sum(self, value: tf.Tensor) -> tf.Tensor:
        """Return the sum of all towers' values; it has no gradient."""
        return self._exchanged(
            value, value.shape, tf.add_n, lambda collective: collective.sum(value, self._device)
        )

    def all_gather(self, value: tf.Tensor) -> tf.Tensor:
        """Return the stack of all towers' values, `[N, ...]`, with gradients to each tower."""

        @tf.custom_gradient
        def gathered(value: tf.Tensor) -> tuple[tf.Tensor, Callable]:
            def gradient(upstream: tf.Tensor) -> tf.Tensor:
                with tf.name_scope(SCOPE):
                    return self.all_sum(upstream)[self.tower]

            return self.all_reduce(value, tf.identity, [self.num_towers, *value.shape]), gradient

        return gathered(value)

    def _exchanged(
        self, value: tf.Tensor, shape: Any, of_list: Callable, meet: Callable, known: Any = None
    ) -> tf.Tensor:
        exchange = self._group.round(next(self._places), of_list)
        exchange.values.append(value)
        exchange.known.append(known)
        if exchange.collective:
            result = meet(exchange.collective)
        else:
            result = tf.identity(tf.zeros(shape, value.dtype))
            exchange.stand_ins.append(result)
        return _once_differentiated(result, value)


@tf.custom_gradient
def _once_differentiated(result: tf.Tensor, value: tf.Tensor) -> tuple[tf.Tensor, Callable]:
    def gradient(_: tf.Tensor) -> tuple:
        raise InputError(_SECOND)

    return tf.identity(result), gradient
