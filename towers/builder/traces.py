"""A tower function, traced on one device or on two towers, and run on copies of its variables.

Nothing of the user's changes: in each run the variables that a trace reads or assigns are replaced
by copies, which hold whatever the run begins from.
"""

import contextlib
import dataclasses
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from towers import tf_internals
from towers.builder import attributes, trials
from towers.builder.device_names import layer_of
from towers.builder.replica_scope import ReplicaScope, assign_by_op, change_losses
from towers.builder.rng import SEEN, functions_inlined
from towers.builder.sharding import PerTower, as_leaves
from towers.errors import InputError, first_line

_PRIMES = 7, 11, 13  # numbers of examples: a shape shows which axis is the batch
_MULTIPLES = 1, 2, 4, 5, 8, 10, 16  # for functions that take even numbers only, and so on
MOST_ROWS = 32  # of a real batch are kept
_SECONDS = 20.0  # for a run: a loop may have no end on other examples

Results = dict[str, list[np.ndarray]]
# What is seen while a function is traced: losses that layers add, summed; of each state, and of
# each attribute, the towers' tensors; outputs of layers.
Seen = dict[str, list[Any]]
_SEEN = "losses", "states", "attributes", "layers"


@dataclasses.dataclass
class Trace:
    """A function, traced for a number of examples, on one device or on towers."""

    size: int
    slice_sizes: Sequence[int] = ()  # of two towers: uneven, the second begins at an odd place
    function: Any = None
    captured: Sequence[Any] = ()  # what it captures, variables' handles and tensors
    ops: Sequence[tuple[str, str]] = ()  # (name, type) of all that it runs
    float_bytes: int = 8  # of its narrowest floats
    leaves: list[Any] = dataclasses.field(default_factory=list)  # of what it returns
    shapes: list[tf.TensorShape | None] = dataclasses.field(default_factory=list)  # of these
    # (op, shape or None, layer) of its random ops, in order.
    draws: list[tuple[str, list[int | None] | None, str]] = dataclasses.field(default_factory=list)
    assigned: list[tf.Variable] = dataclasses.field(default_factory=list)
    states: list[keras.Variable] = dataclasses.field(default_factory=list)  # in "states", see `run`
    weights: list[tf.Variable] = dataclasses.field(default_factory=list)  # in "weights"
    layers: list[str] = dataclasses.field(default_factory=list)  # in "layers"
    losses: list[tuple[str, bool]] = dataclasses.field(default_factory=list)  # (layer, has rows)
    # Attributes and lists that it sets.
    places: list[attributes.Place] = dataclasses.field(default_factory=list)
    # (where it is, tensor) of each in these attributes.
    left: list[tuple[str, Any]] = dataclasses.field(default_factory=list)

    @property
    def variables(self) -> list[tf.Variable]:
        """The variables that it reads or assigns, each once."""
        found = (*self.function.graph.variables, *self.assigned)
        return list({id(v.handle): v for v in found}.values())

    @property
    def kinds(self) -> list[str]:
        """The types of its ops but casts, sorted."""
        return sorted(kind for _, kind in self.ops if kind != "Cast")

    @property
    def not_by_example(self) -> list[bool]:
        """For each result whether it surely has no row for each example."""
        known = [x is not None and x.rank is not None for x in self.shapes]
        pairs = zip(known, self.shapes, strict=True)
        return [k and (not x.rank or x[0] not in (None, self.size)) for k, x in pairs]

    @property
    def is_joined(self) -> bool:
        """Whether towers' results can be joined to those of the batch, and compared."""
        return self.by_example is not False and not any(self.not_by_example)

    @property
    def by_example(self) -> bool | None:
        """Whether a result has a row for each example; None if that is unknown."""
        known = [x for x in self.shapes if x is not None]
        if any(x.rank and x[0] == self.size for x in known):
            return True
        return None if any(not x.is_fully_defined() for x in known) else False


class Tracer:
    """Traces a function and runs the traces."""

    def __init__(self, fn: Callable, batch: Sequence[Any], reached: Sequence[attributes.Holder]):
        """Set a tower function, its arguments, which may be symbolic, and what it can reach.

        Args:
            fn: a tower function.
            batch: its arguments, which may be symbolic.
            reached: what the function can reach.
        """
        self.fn, self.structure, self.reached = fn, batch, reached
        self.leaves = as_leaves(batch)
        self.batch = [leaf for leaf in self.leaves if not isinstance(leaf, PerTower)]
        self.shapes: Sequence[tf.TensorShape] = [leaf.shape for leaf in self.batch]
        self.real: list[tf.Tensor] | None = None
        sizes = [leaf.shape[0] for leaf in self.batch if leaf.shape.rank]
        self.batch_size: int | None = next(iter(sizes), None)  # if it is known
        self.keep_rows(trials.known_values(self.batch))
        self.failure = ""  # why the function could not be traced
        self.in_float32 = False  # whether layers of 16 bits compute in float32 in the next traces
        # {id of a variable's handle: (the variable, its value, the copy)}.
        self._copies: dict[int, tuple[tf.Variable, np.ndarray, tf.Variable]] = {}

    def keep_rows(self, batch: Sequence[tf.Tensor] | None) -> bool:
        """Set the real rows to those of a batch, at most 32, from its first to its last.

        Return whether traces that were made take them: lengths may have been unknown.
        """
        if not batch or not all(map(len, batch)):
            return True
        self.batch_size = number = min(int(x.shape[0]) for x in batch)
        rows = np.linspace(0, number - 1, min(number, MOST_ROWS)).astype(int)
        with tf.init_scope():
            self.real = [tf.gather(x, rows) for x in batch]
        before, self.shapes = self.shapes, [x.shape for x in self.real]
        pairs = zip(before, self.shapes, strict=True)
        return all(a.rank and a[1:].as_list() == b[1:].as_list() for a, b in pairs)

    def first_trace(self) -> Trace | None:
        """Return a trace on one device for the fewest examples that the function takes, or None.

        If lengths are unknown, they are the first with which it can be called.
        """
        shapes = [leaf.shape[1:] for leaf in self.batch if leaf.shape.rank]
        shapes += [v.shape for layer in self.layers[:1] for v in layer.variables]
        dims = {dim for shape in shapes for dim in shape if dim}
        clear = [n for n in _PRIMES if not any(dim % n == 0 for dim in dims)]
        # The function may take no other number of examples than that of its batch.
        own = {x.shape[0] for x in self.batch if x.shape.rank}
        prime = next(n for n in (*clear, *_PRIMES) if n not in own)
        sizes = [(prime * n, (prime - 2) * n) for n in _MULTIPLES if prime * n not in own]
        for shapes in trials.possible_shapes(self.real or self.batch):
            self.shapes = shapes
            traces = (self.traced_or_none(*each) for each in sizes)
            if trace := next(filter(None, traces), None):
                return trace
        return None

    def traced_or_none(self, size: int, of_first: int = 0) -> Trace | None:
        """Return a trace on one device; if the function raises an error, None, and keep why.

        Of `size` examples, the first of two slices is to hold `of_first`.

        Args:
            size: number of examples.
            of_first: those of the first of two slices.
        """
        try:
            trace = self.trace(size)
            trace.slice_sizes = of_first, size - of_first
            return trace
        except InputError:
            raise
        except Exception as error:  # the user's code may raise any; the towers will raise it again
            self.failure = first_line(error)
            return None

    def trace(
        self,
        size: int,
        one: Trace | None = None,
        call: Callable | None = None,
        *,
        backward: bool = False,
        named: bool = False,
    ) -> Trace:
        """Trace the function.

        Args:
            size: number of examples.
            one: for towers, the trace on one device.
            call: calls the function on towers; takes (batch, trace, what is seen).
            backward: whether the trace returns gradients.
            named: whether it returns the outputs of layers.
        """
        trace = Trace(size, one.slice_sizes if one else ())

        def program(inputs: list, scale: tf.Tensor, counted: tf.Tensor) -> dict[str, Any]:
            batch = self._batch(inputs, size, each=call is not None)
            dense = list(filter(trials.is_dense_float, inputs))
            seen: Seen = {key: [] for key in _SEEN}
            with tf.device("/cpu:0"), self._recording(trace, seen, one, counted, named):
                with tf.GradientTape() as tape:
                    tape.watch(dense)
                    if call:
                        returned, updates = call(batch, trace, seen), {}
                    else:
                        with ReplicaScope({}, "/cpu:0") as scope:
                            returned = self.fn(*batch)
                            scope.close(size)
                        updates = scope.updates
                        trace.states = [v for v, _ in updates.values()]
                        seen["states"] = [[value] for _, value in updates.values()]
                        trace.weights = [v for v in tape.watched_variables() if v.dtype.is_floating]
                leaves = tf.nest.flatten(returned)
                if not trace.leaves:
                    trace.leaves = leaves
                    trace.shapes = [x.shape if tf.is_tensor(x) else None for x in leaves]
                joined = [] if call and not one.is_joined else map(_value, leaves)
                outputs = [x for x in joined if isinstance(x, tf.Tensor) and is_number(x)]
                gradients: Sequence[Any] = []
                weights = (one or trace).weights
                if backward:
                    targets = [x for x in outputs if x.dtype.is_floating and x.shape.rank != 0]
                    upstream = [
                        tf.cast(scale, x.dtype) * tf.stop_gradient(1.5 + tf.asinh(x))
                        for x in targets
                    ]
                    with contextlib.nullcontext() if call else ReplicaScope({}, "/cpu:0"):
                        gradients = tape.gradient(targets, [*dense, *weights], upstream)
                for variable, value in updates.values():
                    trace.assigned.append(tf_internals.value_of(variable))
                    assign_by_op(trace.assigned[-1], value)
            pairs = list(zip([*dense, *weights], gradients, strict=False))
            of_weights = pairs[len(dense) :]
            return {
                "outputs": outputs,
                "inputs": [_or_zeros(g, x) for x, g in pairs[: len(dense)]],
                "weights": [_or_zeros(g, v) for v, g in of_weights],
                "squares": [_squares(g) for _, g in of_weights],
                **seen,
            }

        layers = self.layers if self.in_float32 else []
        quiet = np.errstate(all="ignore")  # Keras' constants may not fit into 16 bits
        with tf.init_scope(), quiet, _computing_in_float32(layers):
            trace.function = tf.function(program, autograph=False).get_concrete_function(
                self._specs(size), tf.TensorSpec([], tf.float64), tf.TensorSpec([None], tf.float64)
            )
        trace.captured = list(trace.function.captured_inputs)
        _read_ops(trace)
        return trace

    @property
    def layers(self) -> list[keras.Layer]:
        """The layers that the function can reach, each once, the outermost first."""
        return list({id(x.layer): x.layer for x in self.reached if x.layer is not None}.values())

    def _batch(self, inputs: Sequence[Any], size: int, each: bool) -> Any:
        """Return the function's arguments for a trace; `each` tower has the same `PerTower`."""
        others = iter(map(_with_known_shape, inputs, self._specs(size)))
        leaves = [
            next(others) if not isinstance(x, PerTower)
            else PerTower([x.values[0]] * 2) if each else x.values[0]
            for x in self.leaves
        ]  # fmt: skip
        return tf.nest.pack_sequence_as(self.structure, leaves)

    def _specs(self, size: int) -> list[tf.TypeSpec]:
        pairs = zip(self.batch, self.shapes, strict=True)
        return [trials.spec_of(leaf, size, shape) for leaf, shape in pairs]

    @contextlib.contextmanager
    def _recording(
        self, trace: Trace, seen: Seen, one: Trace | None, counted: tf.Tensor, named: bool
    ) -> Iterator[None]:
        """Record random ops, layers and added losses in the block; restore attributes at its end.

        Added losses are multiplied by `counted`.
        """
        before, graph = attributes.Snapshot(self.reached), tf.compat.v1.get_default_graph()

        def is_outside() -> bool:
            return tf.compat.v1.get_default_graph() is graph

        def draw(op_name: str, /, shape: Any, **arguments: Any) -> tf.Tensor:
            arguments.pop("name", None)
            with tf.name_scope(SEEN):
                drawn = tf_internals.draw_op(op_name)(shape, **arguments)
            dims = None if drawn.shape.rank is None else drawn.shape.as_list()
            trace.draws.append((op_name, dims, layer_of(drawn.op.name)))
            return drawn

        def make_call(before: Callable) -> Callable:
            def call(layer: keras.Layer, *args: Any, **kwargs: Any) -> Any:
                result = before(layer, *args, **kwargs)
                if named and is_outside():
                    found = [x for x in tf.nest.flatten(result) if isinstance(x, tf.Tensor)]
                    found = [x for x in found if x.shape.rank and is_number(x)]
                    seen["layers"] += found
                    trace.layers += [layer.path or layer.name] * len(found)
                return result

            return call

        def change(layer: keras.Layer, loss: tf.Tensor) -> tf.Tensor:
            if not is_outside():
                return tf.zeros_like(loss)
            times = tf.cast(counted[len(trace.losses)], loss.dtype)
            seen["losses"].append(tf.cast(tf.reduce_sum(loss), tf.float64))
            trace.losses.append((layer.path or layer.name, bool(loss.shape.rank)))
            return tf.math.multiply_no_nan(loss, times)

        try:
            with (
                functions_inlined(),
                tf_internals.recording_restarted(),
                change_losses(change),
                tf_internals.replaced(
                    (keras.Layer, "__call__", make_call),
                    (tf, "print", lambda _: lambda *_, **__: tf.no_op()),
                ),
                contextlib.nullcontext() if one else tf_internals.patch_draws(draw),
            ):
                yield
            trace.places = one.places if one else before.changed()
            trace.left = [
                (attributes.description(place), x)
                for place in trace.places
                for x in attributes.tensors_in(attributes.values_at([place]))
            ]
            for x in (_value(x) for _, x in trace.left):
                known = tf.is_symbolic_tensor(x) and is_number(x)
                seen["attributes"].append(tf.identity(x) if known else tf.zeros([]))
        finally:
            before.restore(before.changed())

    def inputs(self, size: int, seed: int = 0, kind: int = 0) -> list[Any]:
        """Return arguments of a trace: real rows if any are known, otherwise made-up ones.

        A seed other than 0 shuffles real rows; for the kind of made-up ones see `trials.sample`.
        """
        random = np.random.default_rng(seed)
        if not self.real:
            return [trials.sample(spec, random, kind) for spec in self._specs(size)]
        number = len(self.real[0])
        rows = np.resize(np.linspace(0, number - 1, min(size, number)).astype(int), size)
        return [tf.gather(x, random.permutation(rows) if seed else rows) for x in self.real]

    def run(
        self, trace: Trace, trial: trials.Trial, counted: Sequence[float] | None = None
    ) -> Results:
        """Run a trace on copies of the variables.

        Args:
            trace: of this function.
            trial: what it begins from.
            counted: what multiplies each added loss, of all towers; None for zeros.

        Returns:
            Arrays: "outputs"; the gradients "inputs" and "weights"; "squares" of each row of a
            sparse gradient; "variables" after the run, in the order of `trace.variables`. For each
            tower there are "losses", "states", "attributes" and "layers".
        """
        with tf.init_scope(), tf.device("/cpu:0"):
            for variable in trace.variables:
                if id(variable.handle) not in self._copies:
                    value = variable.read_value()  # once: a step may be changing it
                    copy = tf_internals.make_variable(value)
                    self._copies[id(variable.handle)] = variable, value.numpy(), copy
            own = {key: copy.handle for key, (*_, copy) in self._copies.items()}
            for variable, value, copy in self._copies.values():
                copy.assign(trial.values(variable, value))
            captures = [own[id(c)] if id(c) in own else trials.stand_in(c) for c in trace.captured]
            trace.function.set_external_captures(captures)
            counted = np.zeros(len(trace.losses)) if counted is None else counted
            numbers = tf.constant(trial.scale, tf.float64), tf.constant(counted, tf.float64)
            # To optimize a trace takes longer than to run it.
            with tf_internals.graph_optimizer_set(disable_meta_optimizer=True):
                call = trace.function, trial.inputs, *numbers
                found = call_for_at_most(_SECONDS, *call)
            found = tf.nest.map_structure(lambda x: x.numpy(), found)
            copies = [self._copies[id(v.handle)][-1] for v in trace.variables]
            return found | {"variables": [copy.numpy() for copy in copies]}

    def value_of(self, variable: tf.Variable) -> np.ndarray:
        """Return the value of a variable that copies begin from."""
        return self._copies[id(variable.handle)][1]

    def release(self) -> None:
        """Free the copies of variables; the next run begins from their values of then."""
        self._copies.clear()


@contextlib.contextmanager
def _computing_in_float32(layers: Sequence[keras.Layer]) -> Iterator[None]:
    """Let those of the layers that compute in 16 bits compute in float32 in the block."""
    before, narrow = [(layer, layer.dtype_policy) for layer in layers], ("float16", "bfloat16")
    try:
        for layer, policy in before:
            if type(policy) is keras.DTypePolicy and policy.compute_dtype in narrow:
                layer.dtype_policy = "float32"
        yield
    finally:
        for layer, policy in before:
            if layer.dtype_policy is not policy:
                layer.dtype_policy = policy


def is_number(x: tf.Tensor) -> bool:
    """Return whether a tensor holds numbers or truth values."""
    return x.dtype.is_floating or x.dtype.is_integer or x.dtype.is_bool or x.dtype.is_complex


def _or_zeros(gradient: Any, like: Any) -> tf.Tensor:
    return tf.zeros_like(like) if gradient is None else tf.convert_to_tensor(gradient)


def _squares(gradient: Any) -> tf.Tensor:
    # Optimizers square each row of a sparse gradient.
    if not isinstance(gradient, tf.IndexedSlices):
        return tf.zeros([])
    squares = tf.IndexedSlices(gradient.values**2, gradient.indices, gradient.dense_shape)
    return tf.convert_to_tensor(squares)


def _value(leaf: Any) -> Any:
    if isinstance(leaf, tf.RaggedTensor):
        leaf = leaf.flat_values
    elif isinstance(leaf, tf.SparseTensor):
        leaf = leaf.values
    is_text = isinstance(leaf, tf.Tensor) and leaf.dtype == tf.string
    return tf.strings.to_hash_bucket_fast(leaf, 2**62) if is_text else leaf


def _with_known_shape(x: Any, spec: tf.TypeSpec) -> Any:
    # TensorFlow knows no dimension of a sparse argument, not even the number of examples.
    if isinstance(x, tf.SparseTensor):
        return tf.SparseTensor(x.indices, x.values, tf.constant(spec.shape.as_list(), tf.int64))
    return x


def _read_ops(trace: Trace) -> None:
    """Set the fields of a trace that its ops show."""
    graph = trace.function.graph
    definition = graph.as_graph_def()
    nodes = [*definition.node, *(n for f in definition.library.function for n in f.node_def)]
    trace.ops = [(node.name, node.op) for node in nodes]
    # Keras casts a model's inputs; what is only cast is not computed with.
    computing = [op for op in graph.get_operations() if op.type not in ("Const", "Cast")]
    outputs = [x for op in computing for x in op.outputs]
    sizes = {x.dtype.size for x in outputs if x.dtype.is_floating and x.shape.num_elements() != 1}
    trace.float_bytes = min(sizes, default=8)


def call_for_at_most(seconds: float, function: Any, *arguments: Any) -> Any:
    """Call a concrete function, and cancel it if it takes too long.

    Args:
        seconds: that it may take.
        function: a concrete function.
        *arguments: of the call.

    Raises:
        tf.errors.CancelledError: it took longer.
    """
    function, cancel = tf_internals.cancelable(function)
    timer = threading.Timer(seconds, cancel)
    timer.daemon = True
    timer.start()
    try:
        return function(*arguments)
    finally:
        timer.cancel()
