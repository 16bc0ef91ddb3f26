"""Traces a tower function for a few examples, in a graph of its own, and runs it there.

It has no side effects: assignments are recorded in a scope that is dropped. BatchNorm normalises by
its moving averages, so that examples do not depend on each other: towers synchronize it anyway.
"""

import contextlib
import dataclasses
import re
from collections.abc import Callable, Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from towers import tf_internals
from towers.builder.attributes import Place
from towers.builder.namespaces import Namespace
from towers.builder.observation import Observer, PerturbedScope
from towers.builder.op_names import layer_of
from towers.builder.replica_scope import STAND_IN_WRITES
from towers.builder.rng import BatchSlice, DrawInfo, ReplicaRng
from towers.builder.sharding import PerTower, as_leaves
from towers.builder.synthetic_inputs import (
    Values,
    known_values,
    sample,
    spec_of,
    stand_in,
    values_in,
)
from towers.errors import InputError

_ASSIGNMENT = re.compile(r"Assign|Resource(StridedSliceAssign|Scatter|Apply)")
# Ops that TensorFlow calls stateful and that may run on synthetic examples: they have no effects.
_HARMLESS = re.compile(
    r"VarHandleOp|ReadVariableOp|DisableCopyOnRead|ResourceGather|Assert|StatefulPartitionedCall|"
    r"Empty$|DeepCopy$|CheckNumerics|VariableShape|Stack(Push|Pop|Close)?V2|"
    r"(Stateful)?(While|If|Case)$|LookupTable(Find|Size)|AnonymousHashTable|TensorArray|Placeholder|"
    r"Random(Uniform|UniformInt|StandardNormal|Shuffle|Gamma|Poisson)|TruncatedNormal|Multinomial"
)
FEW, MORE = 3, 5  # examples of two traces, if the function takes any number of them
_MOST_ELEMENTS = 2**18  # of a batch that is run as a whole
_SHARE_OF_SPECIAL = 0.4  # of the numbers of an input
_SECONDS = 10.0  # for a run: a loop may have no end on synthetic examples


@dataclasses.dataclass
class Trace:
    """A tower function, traced for a number of examples."""

    size: int
    function: Any = None  # which `run` calls
    ops: Sequence[tuple[str, str]] = ()  # (name, type) of all that it runs
    custom_gradients: bool = False  # whether an op has a gradient by `tf.custom_gradient`
    in_16_bits: bool = False  # whether it casts to 16 bits
    effects: Sequence[str] = ()  # types of ops that would have side effects
    # Whether a result has a row for each example (None: unknown); the shapes of all results; for
    # each whether it surely has no row for each example.
    by_example: bool | None = False
    shapes: list[tf.TensorShape | None] = dataclasses.field(default_factory=list)
    not_by_example: list[bool] = dataclasses.field(default_factory=list)
    squeezes: bool = False  # whether it squeezes all axes of 1, also that of one example
    weights: list[str] = dataclasses.field(default_factory=list)  # paths of the weights it reads
    # {id of a variable with a sparse gradient: rows of that}.
    num_rows: dict[int, int | None] = dataclasses.field(default_factory=dict)
    unique_rows: list[str] = dataclasses.field(default_factory=list)  # paths of unrepeated ones
    # (op, shape or None, layer) of its draws, in order.
    draws: list[tuple[str, list[int | None] | None, str]] = dataclasses.field(default_factory=list)
    num_nudged: int = 0  # number of the first draws that `run` can nudge
    # Variables that it assigns, without seeds and those of known aggregation.
    states: list[keras.Variable] = dataclasses.field(default_factory=list)
    inputs: Sequence[keras.Variable] = ()  # variables whose values are arguments of `function`
    # Whether each state's new value depends on no example and no draw; and paths of states that are
    # read after they were assigned, those that depend on examples first.
    data_independent: list[bool] = dataclasses.field(default_factory=list)
    read_again: list[str] = dataclasses.field(default_factory=list)
    # Paths of the layers whose outputs are by example, innermost first, and of those that add a
    # loss; and whether the loss has a row for each example.
    layers: list[str] = dataclasses.field(default_factory=list)
    loss_layers: list[str] = dataclasses.field(default_factory=list)
    added_by_example: list[bool] = dataclasses.field(default_factory=list)
    # Attributes that it sets, and for each tensor in them its shape, None if not dense, and where
    # it is.
    attributes: list[Place] = dataclasses.field(default_factory=list)
    attribute_shapes: list[list[int | None] | None] = dataclasses.field(default_factory=list)
    holders: list[str] = dataclasses.field(default_factory=list)


class Tracer:
    """Traces a tower function for any number of examples."""

    def __init__(self, fn: Callable, batch: Sequence[Any], reached: Sequence[Namespace] = ()):
        """Set the function and what it can read and set.

        Args:
            fn: the tower function.
            batch: its arguments, which may be symbolic.
            reached: the namespaces that it can read and set.
        """
        self.fn, self.structure, self.reached = fn, batch, reached
        self.leaves = as_leaves(batch)
        self.batch = [leaf for leaf in self.leaves if not isinstance(leaf, PerTower)]
        self.shapes: Sequence[tf.TensorShape] = [leaf.shape for leaf in self.batch]
        self.real = known_values(self.batch) if self.batch else None
        self.also_synthetic = False  # see `learn_values`
        self.reads_before = False  # whether reads after an assignment return the old value
        self._slices: dict[tuple[bool, bool], list[Trace]] = {}  # see `slice_traces`
        self._noise: dict[tuple, tf.Tensor] = {}  # see `PerturbedScope`
        self.values = [Values() for _ in self.batch]  # of each argument
        self.failure = ""  # why the last trace failed

    def trace(
        self,
        size: int,
        *,
        rows: BatchSlice | None = None,
        known: Sequence[DrawInfo] | None = None,
        states: Sequence[keras.Variable] = (),
        num_nudged: int = 0,
        backward: bool = False,
        sparse: bool = False,
    ) -> Trace:
        """Trace the function for `size` examples.

        Args:
            size: number of examples.
            rows: draw these rows of a larger batch's random numbers.
            known: analysis of those draws.
            states: variables whose values are inputs.
            num_nudged: number of the first draws that `run` can nudge.
            backward: make `run` return the gradients of layers' outputs and of weights, too.
            sparse: set `num_rows` and `unique_rows`.

        Raises:
            InputError: the function assigns a `tf.Variable`, or creates a trainable one.
        """
        trace = Trace(size, inputs=states, num_nudged=num_nudged)

        def program(inputs: list, values: list, nudges: list) -> dict[str, Any]:
            read = {id(v): value for v, value in zip(states, values, strict=True)}
            others = iter(map(_with_known_shape, inputs, self._specs(size)))
            leaves = [x.values[0] if isinstance(x, PerTower) else next(others) for x in self.leaves]
            with tf.device("/cpu:0"), PerturbedScope(read, self._noise, self.reads_before) as scope:
                watch = Observer(trace, scope, nudges)
                for namespace in self.reached:
                    watch.attributes.save(namespace)
                drawing = tf_internals.patch_draws(watch.draw)
                if rows is not None:
                    drawing = ReplicaRng(rows, known).drawing()
                with watch.recording(), drawing:
                    result = self.fn(*tf.nest.pack_sequence_as(self.structure, leaves))
                    scope.close(size)
                    if sparse:
                        with contextlib.suppress(LookupError):  # an op without a gradient
                            watch.read_sparse_gradients()
                    return watch.outcome(inputs, result, backward)

        with tf.init_scope():
            trace.function = tf.function(program, autograph=False).get_concrete_function(
                self._specs(size),
                [tf.TensorSpec(v.shape, v.dtype) for v in states],
                [tf.TensorSpec(None, tf.int8)] * num_nudged,
            )
        _read_nodes(trace)
        return trace

    def slice_traces(
        self, few: Trace, draws: Sequence[DrawInfo] | None, backward: bool = False
    ) -> list[Trace]:
        """Return traces of two slices, and of the batch of both, with the same random numbers.

        They are traced once.

        Args:
            few: trace of the first slice's size; the values of its states are inputs.
            draws: analysis of its draws.
            backward: trace backward passes, too; so are those of custom gradients.
        """
        backward = backward or few.custom_gradients
        key = backward, self.reads_before
        if key not in self._slices:
            sizes = few.size, few.size // FEW * MORE
            total = sum(sizes)
            starts = (0, sizes[0]), sizes, (0, total)
            rows = [BatchSlice(start, size, total) for start, size in starts]
            options = {"known": draws, "states": few.states}
            try:
                traces = [self.trace(r.size, rows=r, backward=backward, **options) for r in rows]
            except LookupError:  # an op has no gradient
                traces = [self.trace(r.size, rows=r, **options) for r in rows]
            self._slices[key] = traces
        return self._slices[key]

    def size_of_batch(self, otherwise: int) -> int:
        """Return the number of examples of a batch that is known and small, else `otherwise`."""
        shapes = [leaf.shape for leaf in self.real or self.batch]
        known = shapes[0][0] if shapes and shapes[0].rank else None
        sizes = [shape.num_elements() or _MOST_ELEMENTS for shape in shapes]
        return known if known and sum(sizes) < _MOST_ELEMENTS else otherwise

    def examples(self, size: int, seed: int = 0) -> list[Any]:
        """Return inputs of the function: real examples if they are known, else synthetic ones.

        With `also_synthetic` every other pair of seeds gives synthetic ones: the first examples of
        a data set may be all alike.

        Args:
            size: number of examples.
            seed: of what is drawn; odd ones include the special values of the arguments.
        """
        random = np.random.default_rng(seed)
        if self.real and not (self.also_synthetic and seed // 2 % 2):
            rows = random.permutation(np.resize(np.arange(len(self.real[0])), size))
            inputs = [tf.gather(x, rows) for x in self.real]
        else:
            pairs = zip(self._specs(size), self.values, strict=True)
            inputs = [sample(spec, random, values.tokens) for spec, values in pairs]
        return self.with_special(inputs, random) if seed % 2 else inputs

    def with_special(self, inputs: Sequence[Any], random: np.random.Generator) -> list[Any]:
        """Return inputs with some numbers replaced by special values of the arguments.

        Args:
            inputs: as `examples` returns them.
            random: is drawn from.
        """
        replaced = list(inputs)
        for i, (x, values) in enumerate(zip(inputs, self.values, strict=True)):
            if values.special and isinstance(x, tf.Tensor):
                special = np.asarray(values.special, np.float64)
                chosen = tf.constant(random.choice(special, x.shape.as_list()))
                mask = random.random(x.shape.as_list()) < _SHARE_OF_SPECIAL
                replaced[i] = tf.where(mask, tf.cast(chosen, x.dtype), x)
        return replaced

    def learn_values(self, few: Trace) -> None:
        """Set `values`: which values the function accepts, and which it may treat specially."""

        def runs(seed: int) -> bool:
            try:
                results = run(few, self.examples(few.size, seed))
            except Exception:
                return False
            return all(np.all(np.isfinite(x)) for x in (results["rows"], *results["added"]))

        def takes(place: int, values: Values) -> bool:
            before, self.values[place] = self.values[place], values
            taken, self.values[place] = runs(seed=1), before
            return taken

        for place, to_try in enumerate(values_in(few.function.graph, self._specs(few.size))):
            if to_try == Values() or few.effects:
                continue
            if to_try.tokens > 2 and not takes(place, Values(to_try.tokens)):
                to_try.tokens = 2
            special = [v for v in to_try.special if takes(place, Values(to_try.tokens, [v]))]
            self.values[place] = Values(to_try.tokens, special)
        if self.real and not few.effects and (few.states or few.attributes or few.loss_layers):
            self.also_synthetic = True
            self.also_synthetic = runs(seed=2)

    def _specs(self, size: int) -> list[tf.TypeSpec]:
        pairs = zip(self.batch, self.shapes, strict=True)
        return [spec_of(leaf, size, shape) for leaf, shape in pairs]


def run(
    trace: Trace, inputs: Sequence[Any], states: Sequence[Any] = (), nudges: Sequence[Any] = ()
) -> dict[str, Any]:
    """Run a trace on inputs; return arrays.

    Args:
        trace: of a function.
        inputs: from `Tracer.examples`.
        states: values of the variables that are inputs; () for their current values.
        nudges: for each draw that can be nudged an array of its shape, or 0 for all of it: 1
            replaces a number by about the largest that can be drawn, -1 by the least, 0 keeps it.

    Returns:
        "rows": float64 [size, D], the results and attributes of each example; "states": the values
        that it assigns; "added": for each of `trace.loss_layers` the loss, a scalar, and "alone",
        whether each of its rows affects that row only of the results; "attributes": the tensors in
        `trace.attributes`, 0 for those that are not dense; "layers": for each of `trace.layers`
        float64 [size, D]; if traced backward, "gradients" like them, and "weights", the gradient of
        each of `trace.weights`.
    """
    if trace.effects:
        raise RuntimeError(f"it cannot be tried without effects ({', '.join(trace.effects)})")
    function = trace.function
    with tf.init_scope(), tf.device("/cpu:0"):
        function.set_external_captures([stand_in(c) for c in function.captured_inputs])
        pairs = zip(states or trace.inputs, trace.inputs, strict=True)
        values = [tf.cast(value, v.dtype) for value, v in pairs]
        nudges = [tf.constant(nudge, tf.int8) for nudge in nudges or [0] * trace.num_nudged]
        results = tf_internals.call_for_at_most(_SECONDS, function, list(inputs), values, nudges)
    return tf.nest.map_structure(lambda x: x.numpy(), results)


def _with_known_shape(x: Any, spec: tf.TypeSpec) -> Any:
    # TensorFlow knows no dimension of a sparse argument, not even the number of examples.
    if isinstance(x, tf.SparseTensor):
        return tf.SparseTensor(x.indices, x.values, tf.constant(spec.shape.as_list(), tf.int64))
    return x


def _read_nodes(trace: Trace) -> None:
    """Set the fields of a trace that its ops show; raise InputError for assignments."""
    definition = trace.function.graph.as_graph_def()
    nodes = [*definition.node, *(n for f in definition.library.function for n in f.node_def)]
    trace.ops = [(node.name, node.op) for node in nodes]
    for node in nodes:
        op, attr = node.op, node.attr
        trace.custom_gradients |= attr["_gradient_op_type"].s.startswith(b"CustomGradient")
        trace.in_16_bits |= op == "Cast" and attr["DstT"].type in (tf.bfloat16, tf.float16)
        trace.squeezes |= op == "Squeeze" and not attr["squeeze_dims"].list.i
    trace.effects = []
    ops = {(kind, name) for name, kind in trace.ops if STAND_IN_WRITES not in name}
    for kind, name in sorted(ops):
        if _HARMLESS.match(kind) or not tf_internals.is_stateful(kind):
            continue
        if _ASSIGNMENT.match(kind):
            raise InputError(
                f"a tower assigns a tf.Variable, by {kind} in layer {layer_of(name)}, and of "
                "several towers the last would win: make it a keras.Variable"
            )
        trace.effects.append(kind)
