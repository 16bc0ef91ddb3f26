"""Analyzes a function before towers are made of it, and writes the messages about it.

The function is traced once on one device, for a prime number of examples, and not run: a dimension
of that size is the batch. The rules are those of builder/README.md. Whether they hold for the
function is checked by `check`.
"""

import contextlib
import dataclasses
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import keras
import tensorflow as tf

from towers import tf_internals
from towers.builder.attributes import ROWS, SideOutputs, reached_by
from towers.builder.batch_norm import averages_of
from towers.builder.device_names import NO_LAYER, layer_of
from towers.builder.replica_scope import SEED_STATE, policy_of
from towers.builder.rng import SEEN, SEEN_OPS, WHOLE, BatchAxis, DrawInfo
from towers.builder.traces import Trace, Tracer
from towers.errors import InputError

# Messages. Those with braces are formatted with the layer or what else they are about.
_ONE_DEVICE = 'or train on one device, exactly: on_inexact="one_device" (--on_inexact=one_device)'
# (types of ops, what is said of a function with such ops: it is not run on copies).
_UNTRIED = (
    (
        re.compile(r"(Eager)?PyFunc"),
        "python code: layer {} calls Python code while it runs ({}), which cannot be checked; "
        "write it in TensorFlow or keras.ops",
    ),
    (
        re.compile(
            r"(Stateless)?(Parameterized)?(Random(?!Get|Index|GammaGrad)|TruncatedNormal|Multinomial)"
            r"|Rng|Stateful(Uniform|Standard|Truncated|Random)"
        ),
        "random op: layer {} uses {}, whose random numbers do not belong to an example; use "
        "keras.random.uniform, normal or dropout with a keras.random.SeedGenerator",
    ),
    (
        re.compile(
            r"LookupTable(Insert|Remove|Import)|Queue(Enqueue|Dequeue)|(Stage|Unstage|MapStage)$|"
            r"Barrier"
        ),
        "state: layer {} changes a table or a queue ({}), which each tower does for its slice, in "
        "any order; keep the values in a keras.Variable, or change them outside of the towers",
    ),
)
_EFFECTS = re.compile(
    r".*(Mutable(Dense)?HashTable|Queue|Stage|Unstage|Write\w*Summary|WriteFile|Save|Restore|Iterator)"
)
_NOT_CHECKED = "not checked: "
UNCLEAR_DRAW = (
    "random numbers: it is not clear which random numbers of layer {} belong to which example{}; "
    "make the batch the first axis of random tensors, and use a keras.random.SeedGenerator, "
    f"{_ONE_DEVICE}"
)
UNFORESEEN_DRAW = UNCLEAR_DRAW.format(
    NO_LAYER, " (it differs from that for a few examples, or cannot be traced for these)"
)
_REMEDIES = {
    "output": "Its result for an example depends on the rest of the batch, of which each tower has "
    "only its part: compute each example only from itself",
    "rows": "An optimizer that squares rows, such as Adam, computes another update (SGD does not): "
    "look up the weight with each example's own indices",
    "state": "Compute its value from each example separately, or do not assign it in training",
}
_OF_GRADIENTS = (
    "Something in the forward or backward pass depends on the whole batch, of which each tower has "
    "only its part: for example, clip the summed gradient (clipnorm of the optimizer) instead of "
    "clipping in tf.custom_gradient"
)
UNKNOWN_AGGREGATION = (
    "inexact: the variable {} gets different values from towers, and neither their mean, the sum "
    "of their changes, their maximum nor minimum is the value of one device. Create it with "
    'aggregation="sum", "mean" or "only_first_replica" to choose one, pass its value with the '
    f"batch, {_ONE_DEVICE}"
)
ADDED_LOSS = (
    "inexact: layer {} adds a loss that is neither a mean nor a sum over the examples of a batch, "
    "or that the loss function changes after it is added. A tower has only its part of the batch. "
    f"Use keras.ops.mean over examples, {_ONE_DEVICE}"
)
STATE_IN_PYTHON = (
    "state in Python: {} computes something else each time it is traced, for example with "
    "random.random(), NumPy's random numbers or a counter, and each tower is traced separately; "
    "use keras.random with a SeedGenerator, or a keras.Variable"
)
_NOT_JOINED = (
    "side output: {} holds a value that each tower computes from its part of the batch, and these "
    "values cannot be joined. Do not use it outside of the towers, or return the tensors it is "
    "computed from, with a row for each example"
)


def untried(ops: Iterable[tuple[str, str]]) -> list[str]:
    """Return messages on the ops, (name, type) of each, because of which none is run on copies."""
    lines, effects = [], set()
    for layer, seen, kind in sorted({(layer_of(name), SEEN in name, kind) for name, kind in ops}):
        said = [text for types, text in _UNTRIED if types.match(kind)]
        if said and not (seen and kind in SEEN_OPS):
            lines.append(said[0].format(layer, kind))
        elif _EFFECTS.match(kind):
            effects.add(kind)
    if effects and not lines:
        return [not_checked(f"it would have side effects ({', '.join(sorted(effects))})")]
    return lines


def inexact(kind: str, where: str, by: float, how: str) -> str:
    """Return the message for something that towers compute otherwise than one device.

    Args:
        kind: as `check.Difference.kind`.
        where: the layer, output, gradient or variable.
        by: the difference, relative to the largest value.
        how: the trial that shows it.
    """
    size = "in its shape" if by == float("inf") else f"by {by:.0e} of the largest value"
    return (
        f"inexact: {where} differs between towers and one device {size}, {how}. "
        f"{_REMEDIES.get(kind, _OF_GRADIENTS)}, {_ONE_DEVICE}"
    )


def not_checked(reason: str) -> str:
    """Return the message for a function that could not be compared with one device."""
    return (
        f"{_NOT_CHECKED}{reason}. It is therefore not known whether towers compute the same as one "
        "device; compare them with `towers verify`, or with builder.check on other rows"
    )


def is_unchecked(line: str) -> bool:
    """Return whether a message says that something was not checked."""
    return line.startswith(_NOT_CHECKED)


@dataclasses.dataclass
class FunctionAnalysis:
    """What towers know of a function. The check may choose other policies than the first ones.

    Attributes:
        draws: its random ops, in order; None: the function could not be traced.
        policies: how towers' values are combined, by id of an assigned variable, ("loss", place)
            of a loss that a layer adds, or ("attribute", place) of a tensor in an attribute.
        static_rows: ids of `tf.Variable`s, see `gather.StaticIndexedSlices`.
        side_outputs: the tensors that it leaves in attributes.
        trace: on one device, if the function could be traced.
        reason: why it could not be traced.
        refusal: why towers cannot call it, although one device can.
        lines: what is reported of it.
    """

    draws: Sequence[DrawInfo] | None = None
    policies: dict[Any, str | None] = dataclasses.field(default_factory=dict)
    static_rows: Sequence[int] = ()
    side_outputs: SideOutputs = dataclasses.field(default_factory=SideOutputs)
    tracer: Tracer | None = None
    trace: Trace | None = None
    reason: str = ""
    refusal: str = ""
    lines: list[str] = dataclasses.field(default_factory=list)

    @property
    def by_example(self) -> bool | None:
        """Whether it returns a row for each example; None: unknown."""
        return self.trace and self.trace.by_example

    @property
    def needs_check(self) -> bool:
        """Whether towers can be made only if the check has chosen among several policies."""
        trace = self.trace
        if trace is None:
            return False
        places = zip(trace.shapes, trace.not_by_example, strict=True)
        unclear = [x for x, without in places if x is not None and not without]
        return bool(
            self._has_states()
            or trace.losses
            or any(drawn.is_folded for drawn in self.draws or ())
            or any(self.policies["attribute", i] != ROWS for i in range(len(trace.left)))
            or any(not x.is_fully_defined() for x in unclear)
            or any(d and d % trace.size == 0 for x in unclear for d in x[1:] if x.rank)
        )

    def _has_states(self) -> bool:
        """Return whether it assigns variables whose policy is neither declared nor known."""
        norms = [x for x in self.tracer.layers if isinstance(x, keras.layers.BatchNormalization)]
        averages = {key for norm in norms if norm.built for key in averages_of(norm)}
        found = [v for v in self.trace.states if id(v) not in averages and v.name != SEED_STATE]
        return any(policy_of(v) in (None, "sum") for v in found)

    @property
    def not_joined(self) -> list[str]:
        """Messages on tensors that the function leaves and that cannot be joined."""
        left = enumerate(self.trace.left if self.trace else ())
        lost = [where for i, (where, _) in left if self.policies["attribute", i] is None]
        return list(map(_NOT_JOINED.format, lost))

    def check_joinable(self) -> None:
        """Raise InputError if the function's results cannot be joined along the batch."""
        if self.trace is not None and any(self.trace.not_by_example):
            raise InputError(
                "the results of the towers' function cannot be joined along the batch: "
                f"{self.unjoinable_reason}; compute it from the joined outputs"
            )

    @property
    def unjoinable_reason(self) -> str:
        """The reason why slices' results cannot be joined to that of the batch; "" if they can."""
        if any(self.trace.not_by_example):
            return f"its output {self.trace.not_by_example.index(True)} has no row for each example"
        return self.refusal or next(iter(self.not_joined), "")

    @property
    def single_example_reason(self) -> str:
        """The reason why a slice of one example returns another shape; "" if it does not."""
        ranks_of = lambda trace: [x.rank for x in trace.shapes if x]  # noqa: E731
        one = self.tracer.traced_or_none(1)
        if not one or ranks_of(one) == ranks_of(self.trace):
            return ""
        return (
            "it squeezes all axes of size 1, also the batch axis if a tower has one example; name "
            "the axis, such as tf.squeeze(x, axis=-1)"
        )


def analyze(fn: Callable, batch: Sequence[Any]) -> FunctionAnalysis:
    """Analyze a tower function by a trace on one device, for arguments that may be symbolic.

    Args:
        fn: a tower function.
        batch: its arguments, which may be symbolic.

    Raises:
        InputError: the function does what a tower may not.
    """
    tracer = Tracer(tf_internals.converted_as_here(fn), batch, reached_by(fn))
    with tf.init_scope():
        trace = tf.autograph.experimental.do_not_convert(tracer.first_trace)()
    if trace is None:
        return FunctionAnalysis(tracer=tracer, reason=tracer.failure)
    policies: dict[Any, str | None] = {("loss", i): "mean" for i, _ in enumerate(trace.losses)}
    for i, x in enumerate(x for _, x in trace.left):
        has_rows = not isinstance(x, tf.Tensor) or (x.shape.rank and x.shape[0] == trace.size)
        policies["attribute", i] = ROWS if has_rows else "mean"
    return FunctionAnalysis(
        draws=[_layout(trace.size, *drawn) for drawn in trace.draws],
        policies=policies,
        static_rows=list(_with_static_rows(trace)),
        side_outputs=SideOutputs(trace.places, policies),
        tracer=tracer,
        trace=trace,
    )


def unsplit(fn: Callable) -> FunctionAnalysis:
    """Return the analysis of a function that is called once, with the whole batch."""
    return FunctionAnalysis(side_outputs=SideOutputs(reached=reached_by(fn)))


def _layout(size: int, op: str, dims: Sequence[int | None] | None, layer: str) -> DrawInfo:
    """Return what is known of a random op; its layout is None if that is unclear.

    The batch is the axis that has as many elements as there are examples. It can also have a
    multiple: then an example has several numbers, which are taken for neighbors. Without such an
    axis the numbers are for the whole batch.
    """
    if dims is None or None in dims:
        return DrawInfo(op, None, None, layer)
    axes = [axis for axis, dim in enumerate(dims) if dim == size]
    axes = axes or [axis for axis, dim in enumerate(dims) if dim and dim % size == 0]
    layout = None if len(axes) > 1 else BatchAxis(*axes) if axes else WHOLE
    factors = [(0, dim // size) if axis in axes else (dim, 0) for axis, dim in enumerate(dims)]
    return DrawInfo(op, tuple(factors), layout, layer, dims)


def _with_static_rows(trace: Trace) -> Iterator[int]:
    """Yield ids of variables that are looked up by as many rows whatever the number of examples."""
    graph = trace.function.graph

    def number_of_rows(tensor: tf.Tensor) -> Iterator[int | None]:
        for op in tensor.consumers():
            if op.type in ("ReadVariableOp", "Identity", "Cast"):
                yield from number_of_rows(op.outputs[0])
            elif "Gather" in op.type and op.inputs[0] is tensor:
                yield op.inputs[1].shape.num_elements()
            elif op.type.startswith("SparseSegment"):
                yield None

    for variable in graph.variables:
        inner = next((own for outer, own in graph.captures if outer is variable.handle), None)
        numbers = [] if inner is None else list(number_of_rows(inner))
        if numbers and all(number and number % trace.size for number in numbers):
            yield id(variable)


def parts_of(fn: Callable, batch: Sequence[Any]) -> list[Any]:
    """Return the cache key of a function and its batch, a list to compare by `is_same`.

    Its code, closure and defaults are in the key, and the structure, types and shapes of the batch
    but for axis 0.

    Args:
        fn: a tower function: its code, closure and defaults are in the key.
        batch: its arguments, whose structure, types and shapes but for axis 0 are in the key.
    """
    shapes = []
    for leaf in tf.nest.flatten(list(batch)):
        shape = tf.TensorShape(getattr(leaf, "shape", None))
        of_each = shape.as_list()[1:] if shape.rank else None
        # An eager batch and a traced one have the same key: the first analysis serves both.
        kind = "Tensor" if isinstance(leaf, tf.Tensor) else type(leaf).__name__
        shapes.append((kind, getattr(leaf, "dtype", None), of_each))
    parts: list[Any] = [str((tf.nest.map_structure(lambda _: 0, list(batch)), shapes))]
    code = getattr(fn, "__code__", None)  # of a method, too
    if code is None:
        return [*parts, fn]
    parts += [code, getattr(fn, "__self__", None), *(fn.__defaults__ or ())]
    for cell in fn.__closure__ or ():
        with contextlib.suppress(ValueError):  # it is empty
            parts.append(cell.cell_contents)
    return parts
