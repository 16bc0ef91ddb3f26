"""A tower function traced for a few examples, in a graph of its own, and run there.

What is seen of it is noted: its draws, its layers' outputs, the losses they add, and its state.
Nothing of it remains: assignments are kept in a scope that is dropped. BatchNorm normalises by what
it has saved, so that examples do not see each other by it: that is exchanged between towers anyway.
"""

import contextlib
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from towers import tf_private
from towers.builder.assignments import (
    KEPT,
    SEED_STATE,
    TowerScope,
    assignments_refused,
    policy_of,
    refuse_variable,
)
from towers.builder.draws import SEEN, Drawn, Rows, of_rows
from towers.builder.layers import NO_LAYER
from towers.builder.splitting import PerTower, as_leaves

# What may run on made-up examples, of ops that TensorFlow counts as stateful: it leaves no trace.
_HARMLESS = re.compile(
    r"VarHandleOp|ReadVariableOp|DisableCopyOnRead|ResourceGather|Assert|StatefulPartitionedCall|"
    r"(Stateful)?(While|If|Case)$|LookupTable(Find|Size)|AnonymousHashTable|TensorArray|Placeholder|"
    r"Random(Uniform|UniformInt|StandardNormal|Shuffle|Gamma|Poisson)|TruncatedNormal|Multinomial"
)
_UNKNOWN_DIM = 4  # stands for an unknown length that is not the batch
_MOST_NOISY = 2**22  # elements of a weight: noise takes time
_NOISE = 0.1  # is added to weights: a zero would hide what a layer does


class _NoisyScope(TowerScope):
    """Lets the function read weights that are none of them zero."""

    def get_current_value(self, variable: keras.Variable) -> tf.Tensor | None:
        """Return what a variable is; Keras calls this."""
        value = tf_private.value_of(variable)
        noisy = variable.trainable and value is not None and value.dtype.is_floating
        noisy = noisy and value.shape.num_elements() <= _MOST_NOISY
        if noisy and id(variable) not in self.own:
            with self.graph.as_default():
                count = tf.range(value.shape.num_elements(), dtype=tf.float32)
                waves = tf.reshape(tf.sin(12.9898 * count + len(self.own)), value.shape)
                self.own[id(variable)] = value + tf.cast(_NOISE * waves, value.dtype)
        return super().get_current_value(variable)


class Trace:
    """A tower function, traced for a number of examples.

    Attributes:
        size: the number of examples.
        ops: (name, type) of all that it runs.
        effects: types of the ops that would leave a trace if it ran.
        by_example: whether what it returns has a row for each example.
        draws: (op, shape or None, layer) of what it draws, in order.
        states: variables that it assigns, without seeds and those that say how towers merge.
        layers: paths of the layers whose outputs are by example, innermost first.
        adding: paths of the layers that add a loss.
    """

    def __init__(self, size: int):
        """Set the number of examples."""
        self.size, self.by_example = size, False
        self.ops: list[tuple[str, str]] = []
        self.effects: list[str] = []
        self.draws: list[tuple[str, list[int | None] | None, str]] = []
        self.states: list[keras.Variable] = []
        self.layers: list[str] = []
        self.adding: list[str] = []
        self._calls: list[str] = []  # of layers, that are under way
        self._outputs: list[tf.Tensor] = []
        self._added: list[tf.Tensor] = []

    @contextlib.contextmanager
    def watching(self, states: Mapping[int, Any], nudges: Mapping[int, tf.Tensor]) -> Iterator:
        """Note what is called in the block; yield its scope, which lets it leave nothing behind.

        Args:
            states: {id of a variable: its value}.
            nudges: {place of a draw: see `run`}.
        """
        with (
            _NoisyScope(states, "/cpu:0") as self._scope,
            tf_private.functions_inlined(),
            assignments_refused(),
            tf.variable_creator_scope(refuse_variable),
            tf_private.batch_norm_replaced(_without_training, lambda before: before),
            tf_private.add_loss_replaced(self._make_add_loss),
            tf_private.layer_calls_replaced(self._make_call),
        ):
            self._nudges = nudges
            yield self._scope

    def draw(self, op_name: str, /, shape: Any, **arguments: Any) -> tf.Tensor:
        """Draw by one of TensorFlow's ops."""
        arguments.pop("name", None)
        with tf.name_scope(SEEN):
            drawn = tf_private.draw_op(op_name)(shape, **arguments)
        nudge = self._nudges.get(len(self.draws))
        dims = None if drawn.shape.rank is None else drawn.shape.as_list()
        self.draws.append((op_name, dims, self._calls[-1] if self._calls else NO_LAYER))
        if nudge is None:
            return drawn
        least, most = _range_of(op_name, drawn, arguments)
        return tf.where(nudge > 0, most, tf.where(nudge < 0, least, drawn))

    def _make_add_loss(self, before: Callable) -> Callable:
        def add_loss(layer: keras.Layer, loss: Any) -> None:
            if not self._scope.is_inside():
                for part in tf.nest.flatten(loss):
                    self._added.append(tf.cast(tf.reduce_sum(part), tf.float64))
                    self.adding.append(layer.path or layer.name)
            # It joins many examples: the losses of each are looked at without it.
            before(layer, tf.nest.map_structure(tf.zeros_like, loss))

        return add_loss

    def _make_call(self, before: Callable) -> Callable:
        def call(layer: keras.Layer, *args: Any, **kwargs: Any) -> Any:
            self._calls.append(layer.path or layer.name)
            try:
                result = before(layer, *args, **kwargs)
            finally:
                self._calls.pop()
            if not self._scope.is_inside():
                found = self._by_example(result)
                self._outputs += found
                self.layers += [layer.path or layer.name] * len(found)
            return result

        return call

    def outcome(self, result: Any, backward: bool) -> dict[str, Any]:
        """Return what `run` does, as tensors, when the function has returned `result`."""
        updates = [
            (variable, value)
            for variable, value in self._scope.updates.values()
            if variable.name != SEED_STATE and policy_of(variable) is None
        ]
        self.states = [variable for variable, _ in updates]
        leaves, layers = self._by_example(result), self._outputs
        self.by_example = bool(leaves)
        rows = self._rows(leaves) or [tf.zeros([self.size, 0], tf.float64)]
        if backward:
            layers = tf.gradients(rows, layers, unconnected_gradients="zero")
        return {
            "rows": tf.concat(rows, axis=1),
            "states": [tf.convert_to_tensor(value) for _, value in updates],
            "added": self._added,
            "layers": self._rows(layers),
        }

    def _by_example(self, structure: Any) -> list[tf.Tensor]:
        """Return the tensors with a row for each example."""
        return [
            x for x in tf.nest.flatten(structure)
            if isinstance(x, tf.Tensor) and x.shape.rank and x.shape[0] == self.size
            and (x.dtype.is_floating or x.dtype.is_integer or x.dtype.is_bool)
        ]  # fmt: skip

    def _rows(self, leaves: Sequence[Any]) -> list[tf.Tensor]:
        """Return what is of each example, [size, D]."""
        return [tf.cast(tf.reshape(leaf, [self.size, -1]), tf.float64) for leaf in leaves]


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

    def trace(
        self,
        size: int,
        *,
        rows: Rows | None = None,
        known: Sequence[Drawn] | None = None,
        states: Sequence[keras.Variable] = (),
        nudged: Mapping[int, Sequence[int]] | None = None,
        backward: bool = False,
    ) -> Trace:
        """Trace the function for `size` examples.

        Args:
            size: number of examples.
            rows: what is drawn are these rows of a larger batch's draw.
            known: of those draws.
            states: variables whose values are inputs.
            nudged: {place of a draw: its shape}, of draws that `run` can nudge.
            backward: of layers' outputs, return the gradients of all that is returned.
        """
        trace, nudged = Trace(size), nudged or {}

        def program(inputs: list, values: list, nudges: list) -> dict[str, Any]:
            own = {id(v): value for v, value in zip(states, values, strict=True)}
            inputs = iter(inputs)
            leaves = [x.values[0] if isinstance(x, PerTower) else next(inputs) for x in self.leaves]
            nudges = dict(zip(nudged, nudges, strict=True))
            drawing = of_rows(rows, known) if rows else tf_private.draws_replaced(trace.draw)
            with tf.device("/cpu:0"), trace.watching(own, nudges) as scope, drawing:
                result = self.fn(*tf.nest.pack_sequence_as(self.structure, leaves))
                scope.close(size)
                return trace.outcome(result, backward)

        with tf.init_scope():
            trace.function = tf.function(program, autograph=False).get_concrete_function(
                [_spec_of(leaf, size) for leaf in self.batch],
                [tf.TensorSpec(v.shape, v.dtype) for v in states],
                [tf.TensorSpec(shape, tf.int8) for shape in nudged.values()],
            )
        graph = trace.function.graph.as_graph_def()
        nodes = [*graph.node, *(node for f in graph.library.function for node in f.node_def)]
        trace.ops = [(node.name, node.op) for node in nodes]
        kinds = sorted({kind for name, kind in trace.ops if KEPT not in name})
        trace.effects = [
            kind for kind in kinds if tf_private.is_stateful(kind) and not _HARMLESS.match(kind)
        ]
        return trace

    def examples(self, size: int, seed: int = 0) -> list[Any]:
        """Return inputs for so many examples: real ones, or made up where only types are known."""
        random = np.random.default_rng(seed)
        if all(isinstance(x, tf.Tensor) and not tf.is_symbolic_tensor(x) for x in self.batch):
            rows = random.permutation(np.resize(np.arange(len(self.batch[0])), size))
            return [tf.gather(x, rows) for x in self.batch]
        return [_sample(_spec_of(x, size), random) for x in self.batch]


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
        that it assigns; "added": for each of `trace.adding` the loss, a scalar; "layers": for each
        of `trace.layers` float64 [size, D].
    """
    if trace.effects:
        raise RuntimeError(f"it cannot be tried without effects ({', '.join(trace.effects)})")
    function = trace.function
    with tf.init_scope(), tf.device("/cpu:0"):
        function.set_external_captures([
            tf.ones(_known(x.shape), x.dtype) if tf.is_symbolic_tensor(x) else x
            for x in function.captured_inputs  # of the graph around it there are no values
        ])  # fmt: skip
        values = [tf.cast(value, v.dtype) for value, v in zip(states, trace.states, strict=False)]
        nudges = [tf.constant(nudge, tf.int8) for nudge in nudges]
        found = function(list(inputs), values, nudges)
    return tf.nest.map_structure(lambda x: x.numpy(), found)


def _known(shape: tf.TensorShape) -> list[int]:
    return [_UNKNOWN_DIM if dim is None else dim for dim in shape]


def _spec_of(leaf: Any, size: int) -> tf.TypeSpec:
    """Return the type of a leaf of the batch for `size` examples."""
    if isinstance(leaf, tf.RaggedTensor):
        shape = [size, *leaf.shape[1:]]
        return tf.RaggedTensorSpec(shape, leaf.dtype, leaf.ragged_rank, leaf.row_splits.dtype)
    return tf.TensorSpec([size, *_known(leaf.shape[1:])], leaf.dtype)


def _sample(spec: tf.TypeSpec, random: np.random.Generator) -> Any:
    """Return a value of a type: labels and token numbers must be small to be valid."""
    shape = _known(spec.shape)
    if spec.dtype.is_floating:
        value = random.normal(size=shape)
    else:
        value = random.integers(0, 256 if spec.dtype == tf.uint8 else 2, shape)
    value = tf.cast(tf.constant(value), spec.dtype)
    if isinstance(spec, tf.RaggedTensorSpec):
        return tf.RaggedTensor.from_tensor(value, ragged_rank=spec.ragged_rank)
    return value


def _without_training(call: Callable) -> Callable:
    """Return the call of a BatchNorm layer that normalises by what it has saved."""
    return lambda layer, inputs, training=None, mask=None: call(
        layer, inputs, training=False, mask=mask
    )


def _range_of(name: str, drawn: tf.Tensor, arguments: Mapping[str, Any]) -> tuple:
    """Return about the least and the most that an op draws."""
    if "uniform_int" in name:
        least = tf.cast(arguments["minval"], drawn.dtype)
        return least, tf.cast(arguments["maxval"], drawn.dtype) - tf.cast(1, drawn.dtype)
    least, most = (drawn.dtype.min, drawn.dtype.max) if "full_int" in name else (-1.9, 1.9)
    least, most = (0.0, 1 - 2.0**-7) if name == "stateless_random_uniform_v2" else (least, most)
    return tf.constant(least, drawn.dtype), tf.constant(most, drawn.dtype)
