"""A tower function traced for a few examples, in a graph of its own, and run there.

Nothing of it remains: assignments are kept in a scope that is dropped. BatchNorm normalises by what
it has saved, so that examples do not see each other by it: that is exchanged between towers anyway.
"""

import contextlib
import dataclasses
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from towers import tf_private
from towers.builder.assignments import KEPT
from towers.builder.draws import Drawn, Draws, Rows
from towers.builder.examples import sample, spec_of, stand_in
from towers.builder.layers import layer_of
from towers.builder.splitting import PerTower, as_leaves
from towers.builder.watch import NoisyScope, Watch
from towers.errors import InputError

_ASSIGNMENT = re.compile(r"Assign|Resource(StridedSliceAssign|Scatter|Apply)")
# What may run on made-up examples, of ops that TensorFlow counts as stateful: it leaves no trace.
_HARMLESS = re.compile(
    r"VarHandleOp|ReadVariableOp|DisableCopyOnRead|ResourceGather|Assert|StatefulPartitionedCall|"
    r"Empty$|DeepCopy$|CheckNumerics|VariableShape|Stack(Push|Pop|Close)?V2|"
    r"(Stateful)?(While|If|Case)$|LookupTable(Find|Size)|AnonymousHashTable|TensorArray|Placeholder|"
    r"Random(Uniform|UniformInt|StandardNormal|Shuffle|Gamma|Poisson)|TruncatedNormal|Multinomial"
)
_SECONDS = 10.0  # for a run: a loop may have no end on made-up examples


@dataclasses.dataclass
class Trace:
    """A tower function, traced for a number of examples."""

    size: int
    function: Any = None  # which `run` calls
    ops: Sequence[tuple[str, str]] = ()  # (name, type) of all that it runs
    effects: Sequence[str] = ()  # types of ops that would leave a trace if it ran
    # Whether what it returns has a row for each example; None: the trace does not tell.
    by_example: bool | None = False
    shapes: list[tf.TensorShape | None] = dataclasses.field(default_factory=list)  # of all that
    squeezes: bool = False  # whether it takes any axis of 1 away, that of one example, too
    strays: list[bool] = dataclasses.field(default_factory=list)  # what returned has none, surely
    # {id of a variable: rows of its gradient}, of those whose gradient is sparse.
    num_rows: dict[int, int | None] = dataclasses.field(default_factory=dict)
    # (op, shape or None, layer) of what it draws, in order.
    draws: list[tuple[str, list[int | None] | None, str]] = dataclasses.field(default_factory=list)
    # Variables that it assigns, without seeds and those that say how towers merge.
    states: list[keras.Variable] = dataclasses.field(default_factory=list)
    # Paths of the layers whose outputs are by example, innermost first, and of those that add a
    # loss; and whether this has a row for each example.
    layers: list[str] = dataclasses.field(default_factory=list)
    adding: list[str] = dataclasses.field(default_factory=list)
    added_by_example: list[bool] = dataclasses.field(default_factory=list)


class Tracer:
    """Traces a tower function for as many examples as one likes."""

    def __init__(self, fn: Callable, batch: Sequence[Any]):
        """Set the function and its arguments, of whose tensors only type and shape must be known.

        Args:
            fn: a tower function.
            batch: its arguments; a `PerTower` in it stands for its first value.
        """
        self.fn, self.structure = fn, batch
        self.leaves = as_leaves(batch)
        self.batch = [leaf for leaf in self.leaves if not isinstance(leaf, PerTower)]
        self.shapes: Sequence[tf.TensorShape] = [leaf.shape for leaf in self.batch]  # as tried
        self.failure = ""  # why it could not be traced the last time

    def trace(
        self,
        size: int,
        *,
        rows: Rows | None = None,
        known: Sequence[Drawn] | None = None,
        states: Sequence[keras.Variable] = (),
        nudged: Mapping[int, Sequence[int]] | None = None,
        backward: bool = False,
        sparse: bool = False,
    ) -> Trace:
        """Trace the function for `size` examples.

        Args:
            size: number of examples.
            rows: what is drawn are these rows of a larger batch's draw.
            known: of those draws.
            states: variables whose values are inputs.
            nudged: {place of a draw: its shape}, of draws that `run` can nudge.
            backward: of layers' outputs, return the gradients of all that is returned.
            sparse: note `num_rows`.

        Raises:
            InputError: the function assigns a `tf.Variable`.
        """
        trace, nudged = Trace(size), nudged or {}

        def program(inputs: list, values: list, nudges: list) -> dict[str, Any]:
            own = {id(v): value for v, value in zip(states, values, strict=True)}
            inputs = iter(map(_with_known_shape, inputs, self._specs(size)))
            leaves = [x.values[0] if isinstance(x, PerTower) else next(inputs) for x in self.leaves]
            with tf.device("/cpu:0"), NoisyScope(own, "/cpu:0") as scope:
                watch = Watch(trace, scope, dict(zip(nudged, nudges, strict=True)))
                drawing = tf_private.draws_replaced(watch.draw)
                with watch.watching(), drawing if rows is None else Draws(rows, known).drawing():
                    result = self.fn(*tf.nest.pack_sequence_as(self.structure, leaves))
                    scope.close(size)
                    if sparse:
                        with contextlib.suppress(LookupError):  # an op without a gradient
                            trace.num_rows = watch.num_rows(result)
                    return watch.outcome(result, backward)

        with tf.init_scope():
            trace.function = tf.function(program, autograph=False).get_concrete_function(
                self._specs(size),
                [tf.TensorSpec(v.shape, v.dtype) for v in states],
                [tf.TensorSpec(shape, tf.int8) for shape in nudged.values()],
            )
        trace.ops, trace.squeezes = _ops_of(trace.function.graph)
        trace.effects = _effects_of(trace.ops)
        return trace

    def examples(self, size: int, seed: int = 0) -> list[Any]:
        """Return inputs for so many examples: real ones, or made up where only types are known."""
        random = np.random.default_rng(seed)
        if all(isinstance(x, tf.Tensor) and not tf.is_symbolic_tensor(x) for x in self.batch):
            rows = random.permutation(np.resize(np.arange(len(self.batch[0])), size))
            return [tf.gather(x, rows) for x in self.batch]
        return [sample(spec, random) for spec in self._specs(size)]

    def _specs(self, size: int) -> list[tf.TypeSpec]:
        pairs = zip(self.batch, self.shapes, strict=True)
        return [spec_of(leaf, size, shape) for leaf, shape in pairs]


def run(
    trace: Trace, inputs: Sequence[Any], states: Sequence[Any] = (), nudges: Sequence[Any] = ()
) -> dict[str, Any]:
    """Run a trace on inputs; return arrays.

    Args:
        trace: of a function.
        inputs: as `Tracer.examples` gives them.
        states: values of the variables that are inputs.
        nudges: for each draw that can be nudged an array of its shape: which numbers are replaced
            by about the largest that can be drawn (1) or the least (-1).

    Returns:
        "rows": float64 [size, D], what the function returns of each example; "states": the values
        that it assigns; "added": for each of `trace.adding` the loss, a scalar, and "alone",
        whether each of its rows enters that row only of what is returned; "layers": for each of
        `trace.layers` float64 [size, D].
    """
    if trace.effects:
        raise RuntimeError(f"it cannot be tried without effects ({', '.join(trace.effects)})")
    function = trace.function
    with tf.init_scope(), tf.device("/cpu:0"):
        function.set_external_captures([stand_in(c) for c in function.captured_inputs])
        values = [tf.cast(value, v.dtype) for value, v in zip(states, trace.states, strict=False)]
        nudges = [tf.constant(nudge, tf.int8) for nudge in nudges]
        found = tf_private.call_for_at_most(_SECONDS, function, list(inputs), values, nudges)
    return tf.nest.map_structure(lambda x: x.numpy(), found)


def _with_known_shape(x: Any, spec: tf.TypeSpec) -> Any:
    """Return an input of a trace; of sparse ones not even the number of examples would be known."""
    if isinstance(x, tf.SparseTensor):
        return tf.SparseTensor(x.indices, x.values, tf.constant(spec.shape.as_list(), tf.int64))
    return x


def _ops_of(graph: tf.Graph) -> tuple[list[tuple[str, str]], bool]:
    """Return (name, type) of the ops of a graph and its functions, and whether it squeezes all."""
    definition = graph.as_graph_def()
    nodes = [*definition.node, *(n for f in definition.library.function for n in f.node_def)]
    squeezes = any(n.op == "Squeeze" and not n.attr["squeeze_dims"].list.i for n in nodes)
    return [(node.name, node.op) for node in nodes], squeezes


def _effects_of(ops: Sequence[tuple[str, str]]) -> list[str]:
    """Return the types of ops that leave a trace when they run; refuse to assign variables."""
    found = []
    for kind, name in sorted({(kind, name) for name, kind in ops if KEPT not in name}):
        if _HARMLESS.match(kind) or not tf_private.is_stateful(kind):
            continue
        if _ASSIGNMENT.match(kind):
            raise InputError(
                f"a tower assigns a tf.Variable, by {kind} in layer {layer_of(name)}, and of "
                "several towers the last would win: make it a keras.Variable"
            )
        found.append(kind)
    return found
