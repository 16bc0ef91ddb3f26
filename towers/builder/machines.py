"""What crosses the network between machines, where several towers stand on one of them.

A variable that lies on another machine comes to each machine once, and is handed on there; what the
towers of a machine have is summed there before it leaves.
"""

import contextlib
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

from towers import tf_private
from towers.builder.kinds import machine_of


class Reads:
    """What the towers of a compiled step read of variables that lie on other machines."""

    def __init__(self, devices: Sequence[str]):
        """Set the towers' devices; nothing is read yet."""
        self._graph = tf.compat.v1.get_default_graph()
        self._eager = tf.executing_eagerly()
        machines = list(map(machine_of, devices))
        counts = Counter(machines)
        self._first: dict[str, str] = {}  # {machine with several towers: the first one's device}
        for machine, device in zip(machines, devices, strict=True):
            if machine and counts[machine] > 1:
                self._first.setdefault(machine, device)
        self._values: dict[tuple[str, int], tf.Tensor] = {}

    def on(self, device: str) -> contextlib.AbstractContextManager[None]:
        """Let the tower on a device read in the block what has come to its machine."""
        machine = machine_of(device)
        if self._eager or machine not in self._first:
            return contextlib.nullcontext()

        def read(variable: tf.Variable, own: Callable) -> tf.Tensor:
            inside = tf.compat.v1.get_default_graph() is not self._graph  # of a loop, a branch
            if inside or machine_of(variable.device) == machine:
                return own(variable)
            key = machine, id(variable)
            if key not in self._values:
                value = own(variable)
                # An op that remains: without an identity between them each tower would get it.
                with tf.device(self._first[machine]):
                    self._values[key] = tf.raw_ops.PlaceholderWithDefault(
                        input=value, shape=value.shape
                    )
            with tf.device(device):
                return tf.identity(self._values[key])

        return tf_private.reads_replaced(read)


def sums(values: Sequence[Any], devices: Sequence[str], add: Callable) -> Sequence[Any]:
    """Return for each machine the sum by `add` of what its towers have; `values` if all are here.

    Args:
        values: of the towers; the last may have none.
        devices: of the towers.
        add: maps a list of values to their sum.
    """
    groups: dict[str, list[tuple[Any, str]]] = {}
    for value, device in zip(values, devices, strict=False):
        groups.setdefault(machine_of(device), []).append((value, device))
    if not any(groups):
        return values
    found = []
    for members in groups.values():
        with tf.device(members[0][1]):
            own = [value for value, _ in members]
            found.append(own[0] if len(own) == 1 else add(own))
    return found
