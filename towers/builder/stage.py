"""A tower function on a few examples, in a graph of its own: what a rehearsal looks at.

Nothing of it remains: assignments are kept in a scope that is dropped. BatchNorm normalises by what
it has saved, so that examples do not see each other by it: that is exchanged between towers anyway.
"""

import contextlib
import dataclasses
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
from towers.builder.layers import NO_LAYER, layer_of
from towers.builder.splitting import PerTower, as_leaves
from towers.errors import InputError

_UNKNOWN_DIM = 4  # stands for an unknown length that is not the batch
_ASSIGNMENT = re.compile(r"Assign|Resource(StridedSliceAssign|Scatter|Apply)")
_MOST_NOISY = 2**22  # elements of a weight: noise takes time
_NOISE = 0.1  # is added to weights: a zero would hide what a layer does
_SECONDS = 10.0  # for a run: a loop may have no end on made-up examples


@dataclasses.dataclass(frozen=True)
class Nudge:
    """Which numbers of which draw are replaced, as tensors of the graph.

    Attributes:
        place: of the draw; -1: none.
        inner: how many neighbours along its axis are taken for one example's.
        example: whose numbers are replaced.
        high: whether by the largest, or the smallest that can be drawn.
    """

    place: tf.Tensor
    inner: tf.Tensor
    example: tf.Tensor
    high: tf.Tensor


@dataclasses.dataclass
class Take:
    """The function, traced for a number of examples.

    Attributes:
        size: number of examples.
        function: maps inputs, states and the fields of a `Nudge` to what `_program` returns.
        draws: (op, shape or None, layer) in order.
        states: the variables that it assigns, without seeds and those that say how towers merge.
        layers: paths of the layers whose outputs are by example, innermost first.
        adding: paths of the layers that add a loss.
        by_example: whether what it returns has a row for each example.
        calls: paths of the layers that are being called.
        effects: types of ops that would leave a trace if the function ran.
    """

    size: int
    by_example: bool = False
    function: Any = None
    draws: list[tuple[str, list[int | None] | None, str]] = dataclasses.field(default_factory=list)
    states: list[keras.Variable] = dataclasses.field(default_factory=list)
    layers: list[str] = dataclasses.field(default_factory=list)
    adding: list[str] = dataclasses.field(default_factory=list)
    calls: list[str] = dataclasses.field(default_factory=list)
    effects: list[str] = dataclasses.field(default_factory=list)


class Stage:
    """Traces and runs a tower function on a few examples."""

    def __init__(self, fn: Callable, batch: Sequence[Any]):
        """Set the function and its arguments, whose tensors are taken for their type and shape.

        Args:
            fn: a tower function.
            batch: its arguments; a `PerTower` in it stands for its first value.
        """
        self.fn, self.batch = fn, batch
        self.leaves = as_leaves(batch)
        self.is_batch = [not isinstance(leaf, PerTower) for leaf in self.leaves]

    def take(
        self,
        size: int,
        *,
        rows: Rows | None = None,
        known: Sequence[Drawn] | None = None,
        states: Sequence[keras.Variable] = (),
        axes: Mapping[int, int] | None = None,
        backward: bool = False,
    ) -> Take:
        """Trace the function for `size` examples.

        Args:
            size: number of examples.
            rows: what is drawn are these rows of a larger batch's draw.
            known: of those draws.
            states: variables whose values are inputs.
            axes: {place of a draw: its axis}, of draws that can be nudged.
            backward: of layers' outputs, return the gradients of all that is returned.
        """
        take = Take(size)
        specs = [
            _spec(leaf, size) for leaf, split in zip(self.leaves, self.is_batch, strict=True)
            if split
        ]  # fmt: skip
        values = [tf.TensorSpec(v.shape, v.dtype) for v in states]
        controls = [tf.TensorSpec([], t) for t in (tf.int32, tf.int64, tf.int64, tf.bool)]

        def program(inputs: list, values: list, controls: list) -> dict[str, Any]:
            recorder = _Recorder(take, axes or {}, Nudge(*controls))
            own = {id(v): value for v, value in zip(states, values, strict=True)}
            with contextlib.ExitStack() as stack:
                stack.enter_context(tf.device("/cpu:0"))
                scope = stack.enter_context(_NoisyScope(own, "/cpu:0"))
                added = stack.enter_context(_on_stage(scope, take))
                if rows is None:
                    stack.enter_context(tf_private.draws_replaced(recorder))
                else:
                    stack.enter_context(of_rows(rows, known))
                result = self.fn(*self._pack(inputs))
                scope.close(size)
                return _outcome(take, scope, result, added, backward)

        with tf.init_scope():
            function = tf.function(program, autograph=False)
            take.function = function.get_concrete_function(specs, values, controls)
        for kind, name in sorted(tf_private.effects_of(take.function.graph)):
            if KEPT in name:
                continue
            if _ASSIGNMENT.match(kind):
                raise InputError(
                    f"a tower assigns a tf.Variable, by {kind} in layer {layer_of(name)}, and of "
                    "several towers the last would win: make it a keras.Variable"
                )
            take.effects.append(kind)
        return take

    def examples(self, size: int, seed: int = 0) -> list[Any]:
        """Return inputs for so many examples: real ones, or made up where only types are known."""
        random = np.random.default_rng(seed)
        batch = [x for x, split in zip(self.leaves, self.is_batch, strict=True) if split]
        if all(isinstance(x, tf.Tensor) and not tf.is_symbolic_tensor(x) for x in batch):
            rows = random.permutation(np.resize(np.arange(len(batch[0])), size))
            return [tf.gather(x, rows) for x in batch]
        specs = [_spec(x, size) for x, b in zip(self.leaves, self.is_batch, strict=True) if b]
        return [_sample(spec, random) for spec in specs]

    def _pack(self, inputs: Sequence[Any]) -> list[Any]:
        inputs = iter(inputs)
        leaves = [
            next(inputs) if split else leaf.values[0]
            for leaf, split in zip(self.leaves, self.is_batch, strict=True)
        ]
        return tf.nest.pack_sequence_as(self.batch, leaves)


def run(
    take: Take, inputs: Sequence[Any], states: Sequence[Any] = (), nudge: tuple = (-1, 1, 0, False)
) -> dict[str, Any]:
    """Run a take on inputs; return arrays.

    Returns:
        "rows": float64 [size, D], what the function returns of each example, or None; "states":
        the values that it assigns; "added": for each of `take.adding` the loss, a scalar; "layers":
        for each of `take.layers` float64 [size, D].
    """
    if take.effects:
        raise RuntimeError(f"it cannot be tried without effects ({', '.join(take.effects)})")
    with tf.init_scope(), tf.device("/cpu:0"):
        captured = [_stand_in(c) for c in take.function.captured_inputs]
        take.function.set_external_captures(captured)
        place, inner, example, high = nudge
        controls = [
            tf.constant(place), tf.constant(inner, tf.int64), tf.constant(example, tf.int64),
            tf.constant(high),
        ]  # fmt: skip
        states = [tf.cast(value, v.dtype) for value, v in zip(states, take.states, strict=False)]
        found = tf_private.call_for_at_most(_SECONDS, take.function, list(inputs), states, controls)
    return tf.nest.map_structure(lambda x: x.numpy(), found)


# The program.


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


class _Recorder:
    """Notes what is drawn, and replaces what is nudged."""

    def __init__(self, take: Take, axes: Mapping[int, int], nudge: Nudge):
        self.take, self.axes, self.nudge = take, axes, nudge

    def __call__(self, op_name: str, /, shape: Any, **arguments: Any) -> tf.Tensor:
        """Draw by one of TensorFlow's ops."""
        arguments.pop("name", None)
        with tf.name_scope(SEEN):
            drawn = tf_private.draw_op(op_name)(shape, **arguments)
        place = len(self.take.draws)
        dims = None if drawn.shape.rank is None else drawn.shape.as_list()
        layer = self.take.calls[-1] if self.take.calls else NO_LAYER
        self.take.draws.append((op_name, dims, layer))
        if place not in self.axes:
            return drawn
        axis, nudge = self.axes[place], self.nudge
        positions = tf.range(dims[axis], dtype=tf.int64) // nudge.inner
        chosen = tf.equal(positions % self.take.size, nudge.example)
        chosen = tf.reshape(chosen, [-1] + [1] * (len(dims) - axis - 1))
        least, most = _range_of(op_name, drawn, arguments)
        value = tf.where(nudge.high, most, least)
        return tf.where(tf.logical_and(chosen, tf.equal(nudge.place, place)), value, drawn)


def _range_of(name: str, drawn: tf.Tensor, arguments: Mapping[str, Any]) -> tuple:
    """Return about the least and the most that an op draws."""
    if "uniform_int" in name:
        least = tf.cast(arguments["minval"], drawn.dtype)
        return least, tf.cast(arguments["maxval"], drawn.dtype) - tf.cast(1, drawn.dtype)
    least, most = (drawn.dtype.min, drawn.dtype.max) if "full_int" in name else (-1.9, 1.9)
    least, most = (0.0, 1 - 2.0**-7) if name == "stateless_random_uniform_v2" else (least, most)
    return tf.constant(least, drawn.dtype), tf.constant(most, drawn.dtype)


@contextlib.contextmanager
def _on_stage(scope: TowerScope, take: Take) -> Iterator[list[tf.Tensor]]:
    """Yield the losses that layers add in the block: these join many examples, and become zero."""
    added: list[tf.Tensor] = []
    outputs: list[tf.Tensor] = []
    vars(scope).update(outputs=outputs)

    def make_call(before: Callable) -> Callable:
        return lambda layer, inputs, training=None, mask=None: before(
            layer, inputs, training=False, mask=mask
        )

    def make_add_loss(before: Callable) -> Callable:
        def add_loss(layer: keras.Layer, loss: Any) -> None:
            if not scope.is_inside():
                for part in tf.nest.flatten(loss):
                    added.append(tf.cast(tf.reduce_sum(part), tf.float64))
                    take.adding.append(layer.path or layer.name)
            before(layer, tf.nest.map_structure(tf.zeros_like, loss))

        return add_loss

    def make_layer_call(before: Callable) -> Callable:
        def call(layer: keras.Layer, *args: Any, **kwargs: Any) -> Any:
            take.calls.append(layer.path or layer.name)
            try:
                result = before(layer, *args, **kwargs)
            finally:
                take.calls.pop()
            if not scope.is_inside():
                for leaf in tf.nest.flatten(result):
                    if _is_by_example(leaf, take.size):
                        take.layers.append(layer.path or layer.name)
                        outputs.append(leaf)
            return result

        return call

    with (
        tf_private.functions_inlined(),
        assignments_refused(),
        tf.variable_creator_scope(refuse_variable),
        tf_private.batch_norm_replaced(make_call, lambda before: before),
        tf_private.add_loss_replaced(make_add_loss),
        tf_private.layer_calls_replaced(make_layer_call),
    ):
        yield added


def _outcome(
    take: Take, scope: TowerScope, result: Any, added: list, backward: bool
) -> dict[str, Any]:
    """Return what `run` does, as tensors."""
    values = []
    for variable, value in scope.updates.values():
        if variable.name != SEED_STATE and policy_of(variable) is None:
            take.states.append(variable)
            values.append(tf.convert_to_tensor(value))
    leaves = [leaf for leaf in tf.nest.flatten(result) if _is_by_example(leaf, take.size)]
    take.by_example = bool(leaves)
    rows = [_rows(leaf, take.size) for leaf in leaves] or [tf.zeros([take.size, 0], tf.float64)]
    layers = list(scope.outputs)
    if backward:
        layers = tf.gradients(rows, layers, unconnected_gradients="zero")
    return {
        "rows": tf.concat(rows, axis=1),
        "states": values,
        "added": list(added),
        "layers": [_rows(tf.convert_to_tensor(leaf), take.size) for leaf in layers],
    }


def _is_by_example(leaf: Any, size: int) -> bool:
    """Tell whether something is a tensor with a row for each example."""
    if not isinstance(leaf, tf.Tensor) or not leaf.shape.rank or leaf.shape[0] != size:
        return False
    return leaf.dtype.is_floating or leaf.dtype.is_integer or leaf.dtype.is_bool


def _rows(leaf: tf.Tensor, size: int) -> tf.Tensor:
    """Return what is of each example, [size, D]."""
    return tf.cast(tf.reshape(leaf, [size, -1]), tf.float64)


# Inputs.


def _spec(leaf: Any, size: int) -> tf.TypeSpec:
    """Return the type of a leaf of the batch for `size` examples."""
    if isinstance(leaf, tf.RaggedTensor):
        shape = [size, *leaf.shape[1:]]
        return tf.RaggedTensorSpec(shape, leaf.dtype, leaf.ragged_rank, leaf.row_splits.dtype)
    dims = [_UNKNOWN_DIM if dim is None else dim for dim in leaf.shape[1:]]
    kind = tf.SparseTensorSpec if isinstance(leaf, tf.SparseTensor) else tf.TensorSpec
    return kind([size, *dims], leaf.dtype)


def _sample(spec: tf.TypeSpec, random: np.random.Generator) -> Any:
    """Return a value of a type: labels and token numbers must be small to be valid."""
    shape = [_UNKNOWN_DIM if dim is None else dim for dim in spec.shape]
    if spec.dtype.is_floating:
        value = random.normal(size=shape)
    else:
        value = random.integers(0, 256 if spec.dtype == tf.uint8 else 2, shape)
    value = tf.cast(tf.constant(value), spec.dtype)
    if isinstance(spec, tf.RaggedTensorSpec):
        return tf.RaggedTensor.from_tensor(value, ragged_rank=spec.ragged_rank)
    return tf.sparse.from_dense(value) if isinstance(spec, tf.SparseTensorSpec) else value


def _stand_in(captured: tf.Tensor) -> tf.Tensor:
    """Return a value for what the function takes from the graph around it, where there is none."""
    if not tf.is_symbolic_tensor(captured):
        return captured
    shape = [_UNKNOWN_DIM if dim is None else dim for dim in captured.shape]
    return tf.ones(shape, captured.dtype)
