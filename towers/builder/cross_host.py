"""Reads and sums across devices and machines, with as few transfers as possible.

A variable on another machine is sent to each machine once; the values of a machine's towers are
summed there before they are sent. Small tensors are packed: a round trip costs both sides more than
the bytes, and a GPU waits at each transfer.
"""

import contextlib
from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

from towers import tf_internals
from towers.builder.device_types import is_gpu, machine_of
from towers.builder.flatten import is_small, pack, unpack
from towers.builder.sharding import is_device

SCOPE = "small_reads"
FETCHED = "fetched_state"  # name scope of ops that differ between towers


class WeightBroadcast:
    """Reads of variables on other machines, for the towers of a traced step.

    Towers read stand-ins, which are replaced once all towers are traced and all reads are known.
    """

    def __init__(self, devices: Sequence[str]):
        """Set the towers' devices; nothing is read yet."""
        self._graph = tf.compat.v1.get_default_graph()
        self._eager = tf.executing_eagerly()
        machines = list(map(machine_of, devices))
        self._first = dict(zip(reversed(machines), reversed(devices), strict=True))
        self._stand_ins: dict[tuple[str, int], tf.Tensor] = {}
        # {(source, device, type): (variable, stand-in)} of small ones, which are not joined yet.
        self._small: dict[tuple, list[tuple[tf.Variable, tf.Tensor]]] = {}

    def on(self, device: str) -> contextlib.AbstractContextManager[None]:
        """Make reads in the block, for the tower on `device`, use its machine's one copy."""
        machine = machine_of(device)
        if self._eager or not machine:
            return contextlib.nullcontext()

        def read(variable: tf.Variable, original: Callable) -> tf.Tensor:
            inside = tf.compat.v1.get_default_graph() is not self._graph  # of a loop, a branch
            if inside or machine_of(variable.device) == machine:
                return original(variable)
            key, first = (machine, id(variable)), self._first[machine]
            if key not in self._stand_ins:
                small = is_small(variable)
                value = tf.zeros(variable.shape, variable.dtype) if small else original(variable)
                with tf.device(first):
                    stand_in = _stand_in(value)
                self._stand_ins[key] = stand_in
                if small:
                    group = variable.device, first, variable.dtype
                    self._small.setdefault(group, []).append((variable, stand_in))
            with tf.device(device):
                return tf.identity(self._stand_ins[key])

        return tf_internals.patch_reads(read)

    def join(self) -> None:
        """Replace the stand-ins of small values by one packed transfer for each source."""
        _join(self._small, SCOPE)


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
        _join(self._reads, "fetch")


def _stand_in(value: tf.Tensor) -> tf.Tensor:
    # An op that TensorFlow keeps and does not fold: else each tower would fetch the value, and a
    # shape that is computed from it would be that of the zeros.
    return tf.raw_ops.PlaceholderWithDefault(input=value, shape=value.shape)


def _join(groups: dict[tuple, list[tuple[tf.Variable, tf.Tensor]]], scope: str) -> None:
    for (source, device, _), reads in groups.items():
        variables = [variable for variable, _ in reads]
        with tf.device(source), tf.name_scope(scope):
            packed = pack([tf.convert_to_tensor(variable) for variable in variables])
        with tf.device(device), tf.name_scope(scope):
            values = unpack(packed, variables)
        for (_, stand_in), value in zip(reads, values, strict=True):
            tf_internals.set_input(stand_in.op, value)
    groups.clear()


def sum_by_machine(values: Sequence[Any], devices: Sequence[str], add: Callable) -> Sequence[Any]:
    """Return the sum of each machine's `values`, or `values` if all are of this process.

    Args:
        values: of the towers; the last towers may have none.
        devices: of the towers.
        add: maps a list of values to their sum.
    """
    groups: dict[str, list[tuple[Any, str]]] = {}
    for value, device in zip(values, devices, strict=False):
        groups.setdefault(machine_of(device), []).append((value, device))
    if not any(groups):
        return values
    sums = []
    for own_pairs in groups.values():
        with tf.device(own_pairs[0][1]):
            machine_values = [value for value, _ in own_pairs]
            sums.append(machine_values[0] if len(machine_values) == 1 else add(machine_values))
    return sums


def send_after_gradients(
    losses: Sequence[tf.Tensor], gradients: Sequence[Any], devices: Sequence[str]
) -> list[tf.Tensor]:
    """Make each remote loss wait for its gradients, so that both arrive in one message.

    Args:
        losses: of the towers; the last towers may have none.
        gradients: of each loss a structure.
        devices: of the towers.

    Returns:
        The losses, those of this process unchanged.
    """
    delayed = []
    for loss, tower_gradients, device in zip(losses, gradients, devices, strict=False):
        if machine_of(device):
            leaves = tf.nest.flatten(tower_gradients, expand_composites=True)
            with tf.device(device), tf.control_dependencies(filter(tf.is_tensor, leaves)):
                loss = tf.identity(loss)
        delayed.append(loss)
    return delayed
