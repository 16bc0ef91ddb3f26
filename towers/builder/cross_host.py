"""Reads of variables across devices and machines, with as few transfers as possible.

A variable on another machine is sent to each machine once. What a GPU reads of other devices is
packed, since it waits at each transfer. XLA cannot read a variable on another device, as masters
are: what a compiled program reads is read outside of it, once, and passed in as a tensor.
"""

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import tensorflow as tf

from towers import tf_internals
from towers.builder.device_types import is_gpu, machine_of
from towers.builder.flatten import grouped, pack, unpack
from towers.builder.sharding import is_device


def compiled_by_xla(compute: Callable) -> Any:
    """Compile a function without arguments by XLA; return the structure of tensors that it does."""
    with read_outside():
        return tf.function(compute, jit_compile=True, autograph=False)()


@contextlib.contextmanager
def read_outside() -> Iterator[None]:
    """Make functions that the block calls read variables outside, on the block's device."""
    eager, graph = tf.executing_eagerly(), tf.compat.v1.get_default_graph()
    outside, values = tf.init_scope if eager else graph.as_default, {}

    def read(variable: tf.Variable, original: Callable) -> tf.Tensor:
        if tf.executing_eagerly() or tf.compat.v1.get_default_graph() is graph:
            return original(variable)
        if id(variable) not in values:
            with outside():
                values[id(variable)] = tf.identity(original(variable))
        return values[id(variable)]

    with tf_internals.patch_reads(read):
        yield


class WeightBroadcast:
    """Reads of variables on other machines, for the towers of a traced step."""

    def __init__(self, devices: Sequence[str]):
        """Set the towers' devices; nothing is read yet."""
        self._graph = tf.compat.v1.get_default_graph()
        self._first = {machine_of(device): device for device in reversed(devices)}
        self._copies: dict[tuple[str, int], tf.Tensor] = {}

    def on(self, device: str) -> contextlib.AbstractContextManager[None]:
        """Make reads in the block, for the tower on `device`, use its machine's one copy."""
        machine = machine_of(device)
        if tf.executing_eagerly() or not machine:
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
        self._reads: dict[int, tuple[tf.Variable, tf.Tensor]] = {}

    def prefetch(self, variable: tf.Variable) -> tf.Tensor | None:
        """Return a stand-in for a variable's value, None if reading it costs no transfer."""
        packs = variable.dtype.is_floating or variable.dtype in (tf.int64, tf.uint32)
        if variable.trainable or not packs or not is_gpu(self._device):
            return None
        here = is_device(variable.device, self._device)
        if here or tf.executing_eagerly() or tf.compat.v1.get_default_graph() is not self._graph:
            return None
        if id(variable) not in self._reads:
            stand_in = _stand_in(tf.zeros(variable.shape, variable.dtype))
            self._reads[id(variable)] = variable, stand_in
        return self._reads[id(variable)][1]

    def join(self) -> None:
        """Replace the stand-ins by the packed values."""
        reads = list(self._reads.values())
        for group in grouped(reads, lambda read: (read[0].device, read[0].dtype)):
            variables, stand_ins = zip(*group, strict=True)
            with tf.device(variables[0].device), tf.name_scope("fetch"):
                packed = pack([tf.convert_to_tensor(variable) for variable in variables])
            with tf.device(self._device), tf.name_scope("fetch"):
                values = unpack(packed, variables)
            for stand_in, value in zip(stand_ins, values, strict=True):
                tf_internals.set_input(stand_in.op, value)
        self._reads.clear()


def _stand_in(value: tf.Tensor) -> tf.Tensor:
    # An op that TensorFlow keeps and does not fold: else each tower would fetch the value, and a
    # shape that is computed from it would be that of the zeros.
    return tf.raw_ops.PlaceholderWithDefault(input=value, shape=value.shape)
