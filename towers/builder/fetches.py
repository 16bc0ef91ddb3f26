"""What a tower reads of variables that lie on another device, as one transfer for all.

A GPU waits at each. Which variables a tower reads is known once it is traced: until then it goes on
with stand-ins. Those that are trained have tapes to watch them, and copies of their own.
"""

import dataclasses

import tensorflow as tf

from towers import tf_private
from towers.builder.kinds import is_gpu
from towers.builder.packed import pack, unpack
from towers.builder.splitting import is_device

SCOPE = "fetched_state"  # of what differs between towers in a graph, as their places do


@dataclasses.dataclass
class Fetches:
    """The reads of a tower on `device`, which is traced in `graph`."""

    device: str
    graph: tf.Graph
    _reads: dict[tuple[str, tf.DType], list[tuple[tf.Variable, tf.Tensor]]] = dataclasses.field(
        default_factory=dict
    )

    def fetch(self, variable: tf.Variable) -> tf.Tensor | None:
        """Return what stands for a variable's value, None if the tower may as well read it."""
        packs = variable.dtype.is_floating or variable.dtype in (tf.int64, tf.uint32)
        if variable.trainable or not packs or not is_gpu(self.device):
            return None
        here = is_device(variable.device, self.device)
        if here or tf.executing_eagerly() or tf.compat.v1.get_default_graph() is not self.graph:
            return None
        with tf.name_scope(SCOPE):
            stand_in = tf.identity(tf.zeros(variable.shape, variable.dtype))
        reads = self._reads.setdefault((variable.device, variable.dtype), [])
        reads.append((variable, stand_in))
        return stand_in

    def join(self) -> None:
        """Put the values in the places of the stand-ins."""
        for (source, _), reads in self._reads.items():
            with tf.device(source), tf.name_scope("fetch"):
                packed = pack([variable for variable, _ in reads])
            with tf.device(self.device), tf.name_scope("fetch"):
                values = unpack(packed, [variable for variable, _ in reads])
            for (_, stand_in), value in zip(reads, values, strict=True):
                tf_private.set_input(stand_in.op, value)
        self._reads.clear()
