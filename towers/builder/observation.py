"""Runs a tower function under test conditions, and records its draws, layers, losses and states.

Weights may be noisy, added losses are left out, and BatchNorm may be in inference.
"""

import contextlib
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from towers import tf_internals
from towers.builder.attributes import Attributes, description, tensors_at
from towers.builder.batch_norm import averages_of
from towers.builder.diagnostics import random_ops
from towers.builder.op_names import NO_LAYER
from towers.builder.replica_scope import SEED_STATE, ReplicaScope, variables_refused
from towers.builder.rng import SEEN
from towers.builder.variable_aggregation import policy_of

_MOST_NOISY = 2**22  # elements of a weight: noise takes time
_UPSTREAM = 1e3  # the gradient of the results: large enough to be clipped if anything clips
_NOISE = 0.1  # is added to weights: a zero would hide what a layer computes


class PerturbedScope(ReplicaScope):
    """Reads weights with noise added, so that none of them is zero."""

    def __init__(self, own: Mapping[int, Any], noise: dict[tuple, tf.Tensor], reads_before: bool):
        """Record assignments from here on.

        Args:
            own: {id of a Keras variable: what is read in its place}.
            noise: cache of the noise, {(shape, type, seed): tensor}.
            reads_before: whether reads after an assignment return the old value.
        """
        super().__init__(own, "/cpu:0")
        self.noise, self.reads_before = noise, reads_before
        self.paths: list[str] = []  # of weights
        self.weights: dict[int, tf.Tensor] = {}  # {id of a weight's `tf.Variable`: its noisy value}
        self.read_again: dict[int, str] = {}  # {id: path} of variables read after an assignment

    def get_current_value(self, variable: keras.Variable) -> tf.Tensor | None:
        """Return a variable's value; Keras calls this."""
        if id(variable) in self.updates and id(variable) not in self.stand_ins:
            self.read_again[id(variable)] = variable.path
            if self.reads_before:
                return self._source(variable)
        value = tf_internals.value_of(variable)
        weight = variable.trainable and value is not None and value.dtype.is_floating
        if weight and id(variable) not in self.own:
            self.paths.append(variable.path)
            with self.graph.as_default():
                self.own[id(variable)] = self.weights[id(value)] = self._noisy(value)
        return super().get_current_value(variable)

    def _noisy(self, value: tf.Variable) -> tf.Tensor:
        size, seed = value.shape.num_elements(), len(self.own) % 3
        if size > _MOST_NOISY:
            return tf.identity(value)
        key = tuple(value.shape), value.dtype, seed
        if key not in self.noise:
            with tf.init_scope(), tf.device("/cpu:0"):  # the graph has many weights
                waves = np.sin(12.9898 * np.arange(size) + seed).reshape(key[0])
                self.noise[key] = tf.cast(_NOISE * waves, value.dtype)
        return value + self.noise[key]


class Observer:
    """Records a function's random draws, its layers' outputs, and the losses that they add."""

    def __init__(self, trace: Any, scope: PerturbedScope, nudges: Sequence[tf.Tensor]):
        """Start without observations.

        Args:
            trace: the trace to fill.
            scope: of the run.
            nudges: numbers that are added to the first draws.
        """
        self.trace, self.scope, self.nudges = trace, scope, nudges
        self.calls: list[str] = []  # stack of layers
        self.outputs: list[tf.Tensor] = []
        # For each loss that a layer adds its sum, and the zeros that replace it.
        self.added: list[tuple[tf.Tensor, tf.Tensor]] = []
        self.attributes = Attributes()  # before the call

    @contextlib.contextmanager
    def recording(self) -> Iterator[None]:
        """Record the calls in the block; restore attributes at its end."""
        with (
            tf_internals.inline_functions(),
            tf_internals.recording_restarted(),
            variables_refused(),
            tf_internals.patch_batch_norm(_without_training, _saved_moments),
            tf_internals.replaced(
                (keras.Layer, "add_loss", self._make_add_loss),
                (keras.Layer, "__call__", self._make_call),
            ),
        ):
            try:
                yield
            finally:
                self.attributes.restore(self.attributes.changed())

    def draw(self, op_name: str, /, shape: Any, **arguments: Any) -> tf.Tensor:
        """Draw by one of TensorFlow's ops; apply the draw's nudge.

        Args:
            op_name: one of `tf_internals.DRAWS`.
            shape: of the draw.
            **arguments: of the op.
        """
        arguments.pop("name", None)
        with tf.name_scope(SEEN):
            drawn = tf_internals.draw_op(op_name)(shape, **arguments)
        place = len(self.trace.draws)
        dims = None if drawn.shape.rank is None else drawn.shape.as_list()
        self.trace.draws.append((op_name, dims, self.calls[-1] if self.calls else NO_LAYER))
        if place >= len(self.nudges):
            return drawn
        nudge, (least, most) = self.nudges[place], _range_of(op_name, drawn, arguments)
        nudged = tf.where(nudge > 0, most, tf.where(nudge < 0, least, drawn))
        return tf.ensure_shape(nudged, drawn.shape)

    def _make_add_loss(self, before: Callable) -> Callable:
        def add_loss(layer: keras.Layer, loss: Any) -> None:
            # The losses of examples are compared without it, since it depends on many examples.
            losses = tf.nest.flatten(loss)
            zeros = [tf.zeros_like(value) for value in losses]
            if not self.scope.is_inside():
                for value, zero in zip(losses, zeros, strict=True):
                    self.added.append((tf.cast(tf.reduce_sum(value), tf.float64), zero))
                    self.trace.loss_layers.append(layer.path or layer.name)
                    self.trace.added_by_example.append(_is_by_example(value, self.trace.size))
            before(layer, zeros)

        return add_loss

    def _make_call(self, before: Callable) -> Callable:
        def call(layer: keras.Layer, *args: Any, **kwargs: Any) -> Any:
            self.attributes.save_layers(layer)
            self.calls.append(layer.path or layer.name)
            try:
                result = before(layer, *args, **kwargs)
            finally:
                self.calls.pop()
            if not self.scope.is_inside():
                outputs = [x for x in tf.nest.flatten(result) if _is_by_example(x, self.trace.size)]
                self.outputs += outputs
                self.trace.layers += [layer.path or layer.name] * len(outputs)
            return result

        return call

    def read_sparse_gradients(self) -> None:
        """Set the trace's `num_rows` and `unique_rows`."""

        def gathered(weight: tf.Tensor) -> Iterator[tf.Tensor]:  # as by an embedding
            for op in weight.consumers():
                if "Gather" in op.type or op.type.startswith("SparseSegment"):
                    yield op.outputs[0]
                elif op.type in ("Identity", "Cast"):
                    yield from gathered(op.outputs[0])

        for path, (key, weight) in zip(self.scope.paths, self.scope.weights.items(), strict=True):
            # Only the gather is differentiated: the whole way would cost a backward pass.
            if values := list(gathered(weight)):
                (gradient,) = tf.gradients(values, [weight])
                if isinstance(gradient, tf.IndexedSlices):
                    self.trace.num_rows[key] = gradient.values.shape[0]
                    each = [tf.gradients([value], [weight])[0] for value in values]
                    if any(_is_unique(g.indices) for g in each):
                        self.trace.unique_rows.append(path)

    def outcome(self, inputs: Any, result: Any, backward: bool) -> dict[str, Any]:
        """Set the fields of the trace; return the results of `instrumentation.run` as tensors.

        Args:
            inputs: the placeholders of the batch.
            result: of the function.
            backward: whether to compute gradients, too.
        """
        trace, scope, values = self.trace, self.scope, []
        batch = {x.op.name for x in tf.nest.flatten(inputs, expand_composites=True)}
        for variable, value in scope.updates.values():
            # A sum is Keras' default for metrics, whatever they are updated with: it is tried.
            known = policy_of(variable) in ("mean", "first") or id(variable) in scope.averages
            if variable.name != SEED_STATE and not known:
                trace.states.append(variable)
                values.append(tf.convert_to_tensor(value))
        trace.data_independent = [_is_data_independent(value, batch) for value in values]
        last = dict(zip([v.path for v in trace.states], trace.data_independent, strict=True))
        trace.read_again = sorted(scope.read_again.values(), key=lambda path: last.get(path, True))

        size, returned = trace.size, tf.nest.flatten(result)
        trace.attributes = self.attributes.changed()
        held = tensors_at(trace.attributes)
        trace.holders = [description(x) for x in trace.attributes for _ in tensors_at([x])]
        trace.attribute_shapes = [list(x.shape) if isinstance(x, tf.Tensor) else None for x in held]
        unknown = [
            x for x in returned if isinstance(x, tf.Tensor) and not x.shape.is_fully_defined()
        ]
        leaves = [x for x in returned if _is_by_example(x, size)]
        trace.by_example = bool(leaves) or (None if unknown else False)
        trace.shapes = [getattr(x, "shape", None) for x in returned]
        trace.not_by_example = [
            isinstance(x, tf.Tensor)
            and x.shape.rank is not None
            and (not x.shape.rank or x.shape[0] not in (None, size))
            for x in returned
        ]
        leaves += [x for x in held if _is_by_example(x, size)]
        rows = [_rows(x, size) for x in leaves] or [tf.zeros([size, 0], tf.float64)]
        alone = [
            _is_alone(zero, rows[0]) if by_example else tf.constant(False)
            for (_, zero), by_example in zip(self.added, trace.added_by_example, strict=True)
        ]
        gradients, weights = [], []
        if backward:
            # All different, also the largest of each slice: a cosine would be 1 of many results.
            upstream = [_UPSTREAM * tf.stop_gradient(1.5 + tf.asinh(x)) for x in rows]
            trace.weights = list(scope.paths)
            sources = [*self.outputs, *scope.weights.values()]
            of_sources = tf.gradients(rows, sources, upstream, unconnected_gradients="zero")
            gradients, weights = of_sources[: len(self.outputs)], of_sources[len(self.outputs) :]
        return {
            "rows": tf.concat(rows, axis=1),
            "shapes": [tf.shape(x) for x in unknown],
            "states": values,
            "added": [loss for loss, _ in self.added],
            "alone": alone,
            "attributes": [leaf if isinstance(leaf, tf.Tensor) else tf.zeros([]) for leaf in held],
            "weights": [tf.cast(tf.convert_to_tensor(leaf), tf.float64) for leaf in weights],
            "layers": [_rows(leaf, size) for leaf in self.outputs],
            "gradients": [_rows(tf.convert_to_tensor(leaf), size) for leaf in gradients],
        }


def _without_training(call: Callable) -> Callable:
    """Return a BatchNorm layer's `call` that normalises by the moving averages."""

    def without_training(layer: Any, inputs: Any, training: Any = None, mask: Any = None) -> Any:
        if tf_internals.has_own_moments(layer):  # towers do not exchange these
            tf_internals.open_scope().averages |= averages_of(layer)
        else:
            training = False
        return call(layer, inputs, training=training, mask=mask)

    return without_training


def _saved_moments(_: Callable) -> Callable:
    return lambda layer, inputs, mask: tuple(
        tf.cast(moment, inputs.dtype) for moment in (layer.moving_mean, layer.moving_variance)
    )


def _is_data_independent(value: tf.Tensor, batch: Collection[str]) -> bool:
    """Return whether a value depends on no random op and on no op in `batch`."""
    visited, waiting = {value.op.name}, [value.op]
    while waiting:
        op = waiting.pop()
        if op.name in batch or SEEN in op.name or random_ops([(op.name, op.type)]):
            return False
        if op.type in ("Mul", "MulNoNan"):
            factors = map(tf.get_static_value, op.inputs)
            if any(factor is not None and not np.any(factor) for factor in factors):
                continue
        of_variables = [x for x in op.inputs if x.dtype == tf.resource]
        before = [x.op for x in op.inputs] + [user for x in of_variables for user in x.consumers()]
        new = {other.name: other for other in before if other.name not in visited}
        visited |= new.keys()
        waiting += new.values()
    return True


def _range_of(name: str, drawn: tf.Tensor, arguments: Mapping[str, Any]) -> tuple:
    """Return about the least and the largest number that an op draws."""
    if "uniform_int" in name:
        least = tf.cast(arguments["minval"], drawn.dtype)
        return least, tf.cast(arguments["maxval"], drawn.dtype) - tf.cast(1, drawn.dtype)
    least, most = (drawn.dtype.min, drawn.dtype.max) if "full_int" in name else (-1.9, 1.9)
    least, most = (0.0, 1 - 2.0**-7) if name == "stateless_random_uniform_v2" else (least, most)
    return tf.constant(least, drawn.dtype), tf.constant(most, drawn.dtype)


def _is_by_example(leaf: Any, size: int) -> bool:
    """Return whether `leaf` is a tensor of numbers with a row for each example."""
    if not isinstance(leaf, tf.Tensor) or not leaf.shape.rank or leaf.shape[0] != size:
        return False
    return leaf.dtype.is_floating or leaf.dtype.is_integer or leaf.dtype.is_bool


def _is_alone(loss: tf.Tensor, rows: tf.Tensor) -> tf.Tensor:
    """Return whether the first row of results uses the first row of a loss [size, ...] alone."""
    (gradient,) = tf.gradients(rows[0], loss)
    if gradient is None:
        return tf.constant(False)
    used = tf.convert_to_tensor(gradient) != 0
    return tf.reduce_any(used[0]) & ~tf.reduce_any(used[1:])


def _is_unique(indices: tf.Tensor) -> bool:
    """Return whether the rows of a sparse gradient are not repeated, as of embedding_lookup_sparse.

    On one device each of its rows has one sum, which optimizers square.
    """
    while indices.op.type in ("Identity", "Cast", "Reshape", "StopGradient"):
        indices = indices.op.inputs[0]
    if indices.op.type.startswith("SparseSegment"):  # its gradient
        return indices is indices.op.outputs[1]
    return indices.op.type.startswith("Unique") and indices is indices.op.outputs[0]


def _rows(leaf: tf.Tensor, size: int) -> tf.Tensor:
    return tf.cast(tf.reshape(leaf, [size, -1]), tf.float64)
