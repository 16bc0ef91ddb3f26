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

from towers import tf_internals
from towers.builder.attributes import Place
from towers.builder.observation import Observer, PerturbedScope
from towers.builder.op_names import layer_of
from towers.builder.replica_scope import KEPT
from towers.builder.rng import BatchSlice, DrawInfo, ReplicaRng
from towers.builder.sharding import PerTower, as_leaves
from towers.builder.synthetic_inputs import (
    Values,
    known_values,
    sample,
    spec_of,
    stand_in,
    values_in,
    with_special,
)
from towers.errors import InputError

_ASSIGNMENT = re.compile(r"Assign|Resource(StridedSliceAssign|Scatter|Apply)")
# What may run on made-up examples, of ops that TensorFlow counts as stateful: it leaves no trace.
_HARMLESS = re.compile(
    r"VarHandleOp|ReadVariableOp|DisableCopyOnRead|ResourceGather|Assert|StatefulPartitionedCall|"
    r"Empty$|DeepCopy$|CheckNumerics|VariableShape|Stack(Push|Pop|Close)?V2|"
    r"(Stateful)?(While|If|Case)$|LookupTable(Find|Size)|AnonymousHashTable|TensorArray|Placeholder|"
    r"Random(Uniform|UniformInt|StandardNormal|Shuffle|Gamma|Poisson)|TruncatedNormal|Multinomial"
)
FEW, MORE = 3, 5  # examples of two traces, if the function takes any number of them
_MOST_ELEMENTS = 2**18  # of a batch that is run as a whole
_SECONDS = 10.0  # for a run: a loop may have no end on made-up examples


@dataclasses.dataclass
class Trace:
    """A tower function, traced for a number of examples."""

    size: int
    function: Any = None  # which `run` calls
    ops: Sequence[tuple[str, str]] = ()  # (name, type) of all that it runs
    custom_gradients: bool = False  # whether an op has a gradient by `tf.custom_gradient`
    in_16_bits: bool = False  # whether numbers are rounded to 16 bits on the way
    effects: Sequence[str] = ()  # types of ops that would leave a trace if it ran
    # Whether what it returns has a row for each example; None: the trace does not tell.
    by_example: bool | None = False
    shapes: list[tf.TensorShape | None] = dataclasses.field(default_factory=list)  # of all that
    squeezes: bool = False  # whether it takes any axis of 1 away, that of one example, too
    strays: list[bool] = dataclasses.field(default_factory=list)  # what returned has none, surely
    weights: list[str] = dataclasses.field(default_factory=list)  # paths of those that are read
    # {id of a variable: rows of its gradient}, of those whose gradient is sparse.
    num_rows: dict[int, int | None] = dataclasses.field(default_factory=dict)
    # (op, shape or None, layer) of what it draws, in order.
    draws: list[tuple[str, list[int | None] | None, str]] = dataclasses.field(default_factory=list)
    # Variables that it assigns, without seeds and those that say how towers merge.
    states: list[keras.Variable] = dataclasses.field(default_factory=list)
    inputs: Sequence[keras.Variable] = ()  # variables whose values it is given
    # Whether examples and draws have no part in what each of these is assigned; and paths of those
    # that are read after they were assigned, the ones first in which examples have a part.
    apart: list[bool] = dataclasses.field(default_factory=list)
    read_again: list[str] = dataclasses.field(default_factory=list)
    # Paths of the layers whose outputs are by example, innermost first, and of those that add a
    # loss; and whether this has a row for each example.
    layers: list[str] = dataclasses.field(default_factory=list)
    adding: list[str] = dataclasses.field(default_factory=list)
    added_by_example: list[bool] = dataclasses.field(default_factory=list)
    # Attributes of layers that it changes, and shapes of the tensors in them, None if not dense.
    left: list[Place] = dataclasses.field(default_factory=list)
    shapes_left: list[list[int | None] | None] = dataclasses.field(default_factory=list)


class Tracer:
    """Traces a tower function for as many examples as one likes."""

    def __init__(self, fn: Callable, batch: Sequence[Any], layers: Sequence[keras.Layer] = ()):
        """Set a function and its arguments, of whose tensors only type and shape must be known.

        It may change attributes of `layers`, beside those of the layers that it calls.
        """
        self.fn, self.structure, self.layers = fn, batch, layers
        self.leaves = as_leaves(batch)
        self.batch = [leaf for leaf in self.leaves if not isinstance(leaf, PerTower)]
        self.shapes: Sequence[tf.TensorShape] = [leaf.shape for leaf in self.batch]  # as tried
        self.real = known_values(self.batch) if self.batch else None
        self.made_up_too = False  # see `learn_values`
        self.reads_before = False  # whether what is assigned is read again as it was before
        self._slices: dict[tuple[bool, bool], list[Trace]] = {}  # see `two_and_both`
        self._noise: dict[tuple, tf.Tensor] = {}  # see `PerturbedScope`
        self.values = [Values() for _ in self.batch]  # that arguments have
        self.failure = ""  # why it could not be traced the last time

    def trace(
        self,
        size: int,
        *,
        rows: BatchSlice | None = None,
        known: Sequence[DrawInfo] | None = None,
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
            backward: return the gradients of layers' outputs and of weights, too.
            sparse: note `num_rows`.

        Raises:
            InputError: the function assigns a `tf.Variable`.
        """
        trace, nudged = Trace(size, inputs=states), nudged or {}

        def program(inputs: list, values: list, nudges: list) -> dict[str, Any]:
            own = {id(v): value for v, value in zip(states, values, strict=True)}
            given = iter(map(_with_known_shape, inputs, self._specs(size)))
            leaves = [x.values[0] if isinstance(x, PerTower) else next(given) for x in self.leaves]
            with tf.device("/cpu:0"), PerturbedScope(own, self._noise, self.reads_before) as scope:
                watch = Observer(trace, scope, dict(zip(nudged, nudges, strict=True)))
                for layer in self.layers:
                    watch.attributes.note(layer)
                drawing = tf_internals.patch_draws(watch.draw)
                if rows is not None:
                    drawing = ReplicaRng(rows, known).drawing()
                with watch.watching(), drawing:
                    result = self.fn(*tf.nest.pack_sequence_as(self.structure, leaves))
                    scope.close(size)
                    if sparse:
                        with contextlib.suppress(LookupError):  # an op without a gradient
                            trace.num_rows = watch.num_rows()
                    return watch.outcome(inputs, result, backward)

        with tf.init_scope():
            trace.function = tf.function(program, autograph=False).get_concrete_function(
                self._specs(size),
                [tf.TensorSpec(v.shape, v.dtype) for v in states],
                [tf.TensorSpec(shape, tf.int8) for shape in nudged.values()],
            )
        _read_nodes(trace)
        return trace

    def two_and_both(
        self, few: Trace, draws: Sequence[DrawInfo] | None, backward: bool = False
    ) -> list[Trace]:
        """Return traces of two slices, and of the batch that they make, made once: they draw alike.

        `few` is the trace of the first slice's size; the values of its states are inputs. Backward
        passes are traced if they are asked for or the function has gradients of its own.
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
                found = [self.trace(r.size, rows=r, backward=backward, **options) for r in rows]
            except LookupError:  # an op has no gradient
                found = [self.trace(r.size, rows=r, **options) for r in rows]
            self._slices[key] = found
        return self._slices[key]

    def size_of_batch(self, otherwise: int) -> int:
        """Return how many examples the batch has, if that is known and they are soon computed."""
        shapes = [leaf.shape for leaf in self.real or self.batch]
        known = shapes[0][0] if shapes and shapes[0].rank else None
        sizes = [shape.num_elements() or _MOST_ELEMENTS for shape in shapes]
        return known if known and sum(sizes) < _MOST_ELEMENTS else otherwise

    def examples(self, size: int, seed: int = 0) -> list[Any]:
        """Return inputs for so many examples: real ones, or made up where only types are known.

        Where there are real ones those of other pairs of seeds are made up, if the function takes
        them: the first examples of a data set may be all alike. Those of an odd seed have values
        that the function treats otherwise than others, if it does.
        """
        random = np.random.default_rng(seed)
        if self.real and not (self.made_up_too and seed // 2 % 2):
            rows = random.permutation(np.resize(np.arange(len(self.real[0])), size))
            found = [tf.gather(x, rows) for x in self.real]
        else:
            pairs = zip(self._specs(size), self.values, strict=True)
            found = [sample(spec, random, own.tokens) for spec, own in pairs]
        return self.with_special(found, random) if seed % 2 else found

    def with_special(self, inputs: Sequence[Any], random: np.random.Generator) -> list[Any]:
        """Return inputs some of which are values that the function treats otherwise."""
        pairs = zip(inputs, self.values, strict=True)
        return [with_special(x, own.special, random) for x, own in pairs]

    def learn_values(self, few: Trace) -> None:
        """Find out which values the function takes, and which of them it treats otherwise."""

        def runs(seed: int) -> bool:
            try:
                found = run(few, self.examples(few.size, seed))
            except Exception:
                return False
            return all(np.all(np.isfinite(x)) for x in (found["rows"], *found["added"]))

        def takes(place: int, values: Values) -> bool:
            before, self.values[place] = self.values[place], values
            taken, self.values[place] = runs(seed=1), before
            return taken

        for place, own in enumerate(values_in(few.function.graph, self._specs(few.size))):
            if own == Values() or few.effects:
                continue
            if own.tokens > 2 and not takes(place, Values(own.tokens)):
                own.tokens = 2
            special = [v for v in own.special if takes(place, Values(own.tokens, [v]))]
            self.values[place] = Values(own.tokens, special)
        if self.real and not few.effects and (few.states or few.left or few.adding):
            self.made_up_too = True
            self.made_up_too = runs(seed=2)

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
        states: values of the variables that are inputs; those that they have, if there are none.
        nudges: for each draw that can be nudged an array of its shape: which numbers are replaced
            by about the largest that can be drawn (1) or the least (-1).

    Returns:
        "rows": float64 [size, D], what the function returns of each example, and leaves of it;
        "states": the values that it assigns; "added": for each of `trace.adding` the loss, a
        scalar, and "alone", whether each of its rows enters that row only of what is returned;
        "left": the tensors in `trace.left`, 0 for those that are not dense; "layers": for each of
        `trace.layers` float64 [size, D]; if traced backward, "gradients" like them, and "weights",
        the gradient of each of `trace.weights`.
    """
    if trace.effects:
        raise RuntimeError(f"it cannot be tried without effects ({', '.join(trace.effects)})")
    function = trace.function
    with tf.init_scope(), tf.device("/cpu:0"):
        function.set_external_captures([stand_in(c) for c in function.captured_inputs])
        pairs = zip(states or trace.inputs, trace.inputs, strict=True)
        values = [tf.cast(value, v.dtype) for value, v in pairs]
        nudges = [tf.constant(nudge, tf.int8) for nudge in nudges]
        found = tf_internals.call_for_at_most(_SECONDS, function, list(inputs), values, nudges)
    return tf.nest.map_structure(lambda x: x.numpy(), found)


def _with_known_shape(x: Any, spec: tf.TypeSpec) -> Any:
    """Return an input of a trace; of sparse ones not even the number of examples would be known."""
    if isinstance(x, tf.SparseTensor):
        return tf.SparseTensor(x.indices, x.values, tf.constant(spec.shape.as_list(), tf.int64))
    return x


def _read_nodes(trace: Trace) -> None:
    """Set what a trace's graph and the functions that it calls tell; refuse assignments."""
    definition = trace.function.graph.as_graph_def()
    nodes = [*definition.node, *(n for f in definition.library.function for n in f.node_def)]
    trace.ops = [(node.name, node.op) for node in nodes]
    for node in nodes:
        op, attr = node.op, node.attr
        trace.custom_gradients |= attr["_gradient_op_type"].s.startswith(b"CustomGradient")
        trace.in_16_bits |= op == "Cast" and attr["DstT"].type in (tf.bfloat16, tf.float16)
        trace.squeezes |= op == "Squeeze" and not attr["squeeze_dims"].list.i
    trace.effects = []
    for kind, name in sorted({(kind, name) for name, kind in trace.ops if KEPT not in name}):
        if _HARMLESS.match(kind) or not tf_internals.is_stateful(kind):
            continue
        if _ASSIGNMENT.match(kind):
            raise InputError(
                f"a tower assigns a tf.Variable, by {kind} in layer {layer_of(name)}, and of "
                "several towers the last would win: make it a keras.Variable"
            )
        trace.effects.append(kind)
