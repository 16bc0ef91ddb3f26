"""Reads and sums across devices and machines, with as few transfers as possible.

A variable on another machine is sent to each machine once; the values of a machine's towers are
summed there before they are sent. What a GPU reads of other devices is packed, since it waits at
each transfer.
"""

import contextlib
from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

from towers import tf_internals
from towers.builder.device_types import is_gpu, machine_of
from towers.builder.flatten import pack, unpack
from towers.builder.sharding import is_device

FETCHED = "fetched_state"  # name scope of ops that differ between towers


class WeightBroadcast:
    """Reads of variables on other machines, for the towers of a traced step."""

    def __init__(self, devices: Sequence[str]):
        """Set the towers' devices; nothing is read yet."""
        self._graph = tf.compat.v1.get_default_graph()
        self._eager = tf.executing_eagerly()
        machines = list(map(machine_of, devices))
        self._first = dict(zip(reversed(machines), reversed(devices), strict=True))
        self._copies: dict[tuple[str, int], tf.Tensor] = {}

    def on(self, device: str) -> contextlib.AbstractContextManager[None]:
        """Make reads in the block, for the tower on `device`, use its machine's one copy."""
        machine = machine_of(device)
        if self._eager or not machine:
            return contextlib.nullcontext()

        def read(variable: tf.Variable, original: Callable) -> tf.Tensor:
            inside = tf.compat.v1.get_default_graph() is not self._graph  # of a loop, a branch
            if inside or machine_of(variable.device) == machine:
                return original(variable)
            key = machine, id(variable)
            if key not in self._copies:
                value = original(variable)
                with tf.device(self._first[machine]):
                    self._copies[key] = _stand_in(value)
            with tf.device(device):
                return tf.identity(self._copies[key])

        return tf_internals.patch_reads(read)


class VariablePrefetch:
    """Reads of untrained variables on other devices, for a tower on a GPU, as one transfer."""

    def __init__(self, device: str):
        """Set the tower's device; nothing is read yet."""
        self._device, self._graph = device, tf.compat.v1.get_default_graph()
        self._reads: dict[tuple, list[tuple[tf.Variable, tf.Tensor]]] = {}

    def prefetch(self, variable: tf.Variable) -> tf.Tensor | None:
        """Return a stand-in for a variable's value, None if reading it costs no transfer."""
        packs = variable.dtype.is_floating or variable.dtype in (tf.int64, tf.uint32)
        if variable.trainable or not packs or not is_gpu(self._device):
            return None
        here = is_device(variable.device, self._device)
        if here or tf.executing_eagerly() or tf.compat.v1.get_default_graph() is not self._graph:
            return None
        with tf.name_scope(FETCHED):
            stand_in = _stand_in(tf.zeros(variable.shape, variable.dtype))
        group = variable.device, self._device, variable.dtype
        self._reads.setdefault(group, []).append((variable, stand_in))
        return stand_in

    def join(self) -> None:
        """Replace the stand-ins by the packed values."""
        for (source, device, _), reads in self._reads.items():
            variables = [variable for variable, _ in reads]
            with tf.device(source), tf.name_scope("fetch"):
                packed = pack([tf.convert_to_tensor(variable) for variable in variables])
            with tf.device(device), tf.name_scope("fetch"):
                values = unpack(packed, variables)
            for (_, stand_in), value in zip(reads, values, strict=True):
                tf_internals.set_input(stand_in.op, value)
        self._reads.clear()


def _stand_in(value: tf.Tensor) -> tf.Tensor:
    # An op that TensorFlow keeps and does not fold: else each tower would fetch the value, and a
    # shape that is computed from it would be that of the zeros.
    return tf.raw_ops.PlaceholderWithDefault(input=value, shape=value.shape)


def sum_by_machine(values: Sequence[Any], plan: Any) -> Sequence[Any]:
    """Return the sum of each machine's `values`, or `values` if all are of this process.

    Args:
        values: of the towers; the last towers may have none.
        plan: the `gather.GatherPlan`.
    """
    groups: dict[str, list[tuple[Any, str]]] = {}
    for value, device in zip(values, plan.towers, strict=False):
        groups.setdefault(machine_of(device), []).append((value, device))
    if not any(groups):
        return values
    sums = []
    for own_pairs in groups.values():
        with tf.device(own_pairs[0][1]):
            machine_values = [value for value, _ in own_pairs]
            sums.append(machine_values[0] if len(machine_values) == 1 else plan.add(machine_values))
    return sums
