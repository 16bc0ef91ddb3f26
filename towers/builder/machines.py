"""What crosses the network between machines.

A variable that lies on another machine comes to each machine once, and is handed on there; what the
towers of a machine have is summed there before it leaves. Small tensors cross as one: a round trip
costs both sides more than the bytes.
"""

import contextlib
from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

from towers import tf_private
from towers.builder.kinds import machine_of
from towers.builder.packed import is_small, pack, unpack

SCOPE = "small_reads"


class Reads:
    """What the towers of a compiled step read of variables that lie on other machines.

    Which these are is known when all towers are traced: until then they go on with stand-ins.
    """

    def __init__(self, devices: Sequence[str]):
        """Set the towers' devices; nothing is read yet."""
        self._graph = tf.compat.v1.get_default_graph()
        self._eager = tf.executing_eagerly()
        machines = list(map(machine_of, devices))
        self._first = dict(zip(reversed(machines), reversed(devices), strict=True))
        self._stand_ins: dict[tuple[str, int], tf.Tensor] = {}
        self._small: dict[tuple, list[tuple[tf.Variable, tf.Tensor]]] = {}  # not joined yet

    def on(self, device: str) -> contextlib.AbstractContextManager[None]:
        """Let the tower on a device read in the block what will have come to its machine."""
        machine = machine_of(device)
        if self._eager or not machine:
            return contextlib.nullcontext()

        def read(variable: tf.Variable, own: Callable) -> tf.Tensor:
            inside = tf.compat.v1.get_default_graph() is not self._graph  # of a loop, a branch
            if inside or machine_of(variable.device) == machine:
                return own(variable)
            small = is_small(variable)
            key = machine, id(variable)
            if key not in self._stand_ins:
                value = tf.zeros(variable.shape, variable.dtype) if small else own(variable)
                # An op that remains: without an identity between them each tower would get it, and
                # whatever TensorFlow makes a constant, as a shape, would wait for the read itself.
                with tf.device(self._first[machine]):
                    stand_in = tf.raw_ops.PlaceholderWithDefault(input=value, shape=value.shape)
                self._stand_ins[key] = stand_in
                if small:
                    group = machine, variable.device, variable.dtype
                    self._small.setdefault(group, []).append((variable, stand_in))
            with tf.device(device):
                return tf.identity(self._stand_ins[key])

        return tf_private.reads_replaced(read)

    def join(self) -> None:
        """Let small values come, those from one device as one tensor: it costs one round trip."""
        for (machine, source, _), reads in self._small.items():
            variables = [variable for variable, _ in reads]
            with tf.device(source), tf.name_scope(SCOPE):
                packed = pack([tf.convert_to_tensor(variable) for variable in variables])
            with tf.device(self._first[machine]), tf.name_scope(SCOPE):
                values = unpack(packed, variables)
            for (_, stand_in), value in zip(reads, values, strict=True):
                tf_private.set_input(stand_in.op, value)
        self._small.clear()


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


def sent_last(
    losses: Sequence[tf.Tensor], gradients: Sequence[Any], devices: Sequence[str]
) -> list[tf.Tensor]:
    """Return the towers' losses, those on other machines as they are once their gradients are done.

    So what comes from there tells of both, in one message.
    """
    found = []
    for loss, own, device in zip(losses, gradients, devices, strict=False):
        if machine_of(device):
            leaves = tf.nest.flatten(own, expand_composites=True)
            with tf.device(device), tf.control_dependencies(filter(tf.is_tensor, leaves)):
                loss = tf.identity(loss)
        found.append(loss)
    return found
