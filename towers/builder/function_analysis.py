"""What towers must know of a function before they are made, by the rules of builder/README.md.

The function is traced once on one device, for a prime number of examples, and not run: a dimension
of that size is the batch. Whether the rules hold for the function is checked by `check`.
"""

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import keras
import tensorflow as tf

from towers import tf_internals
from towers.builder import diagnostics, rng_layout
from towers.builder.added_losses import AddedLoss
from towers.builder.attributes import ROWS, SideOutputs
from towers.builder.batch_norm import averages_of
from towers.builder.namespaces import reached_by
from towers.builder.replica_scope import SEED_STATE
from towers.builder.rng import DrawInfo
from towers.builder.traces import Trace, Tracer
from towers.builder.variable_aggregation import policy_of
from towers.errors import InputError


@dataclasses.dataclass
class FunctionAnalysis:
    """What towers know of a function. The check may choose other policies than the first ones."""

    draws: Sequence[DrawInfo] | None = None  # in order; None: the function could not be traced
    policies: dict[int, str] = dataclasses.field(default_factory=dict)  # of states, by id
    added: Sequence[AddedLoss] = ()  # the losses that layers add, in order
    static_rows: Sequence[int] = ()  # ids of `tf.Variable`s: see `gather.StaticIndexedSlices`
    side_outputs: SideOutputs = dataclasses.field(default_factory=SideOutputs)
    tracer: Tracer | None = None
    trace: Trace | None = None  # on one device, if the function could be traced
    reason: str = ""  # why it could not be traced
    refusal: str = ""  # why towers cannot call it, although one device can
    lines: list[str] = dataclasses.field(default_factory=list)  # what is reported of it

    @property
    def by_example(self) -> bool | None:
        """Whether it returns a row for each example; None: unknown."""
        return self.trace and self.trace.by_example

    @property
    def states(self) -> list[keras.Variable]:
        """The variables that it assigns and whose policy is neither declared nor known."""
        layers = [namespace.owner for namespace in self.tracer.reached] if self.trace else []
        norms = [x for x in layers if isinstance(x, keras.layers.BatchNormalization) and x.built]
        averages = {key for norm in norms for key in averages_of(norm)}
        found = [v for v in (self.trace.states if self.trace else ()) if id(v) not in averages]
        return [v for v in found if v.name != SEED_STATE and policy_of(v) in (None, "sum")]

    @property
    def needs_check(self) -> bool:
        """Whether towers can be made only if the check has chosen among several policies."""
        trace = self.trace
        if trace is None:
            return False
        places = zip(trace.shapes, trace.not_by_example, strict=True)
        unclear = [x for x, without in places if x is not None and not without]
        return bool(
            self.states
            or self.added
            or any(drawn.is_folded for drawn in self.draws or ())
            or any(policy != ROWS for policy in self.side_outputs.policies)
            or any(not x.is_fully_defined() for x in unclear)
            or any(d and d % trace.size == 0 for x in unclear for d in x[1:] if x.rank)
        )

    @property
    def not_joined(self) -> list[str]:
        """Lines on tensors that the function leaves and that cannot be joined."""
        holders = self.trace.holders if self.trace else ()
        pairs = zip(holders, self.side_outputs.policies, strict=False)
        return [diagnostics.not_joined(holder) for holder, policy in pairs if policy is None]

    def check_joinable(self) -> None:
        """Raise InputError if the function's results cannot be joined along the batch."""
        if self.trace is not None and (reason := self._rowless_reason):
            raise InputError(
                f"what the towers' function returns cannot be joined along the batch: {reason}; "
                "compute that from the joined outputs"
            )

    @property
    def _rowless_reason(self) -> str:
        if any(self.trace.not_by_example):
            return f"its output {self.trace.not_by_example.index(True)} has no row for each example"
        return ""

    @property
    def unjoinable_reason(self) -> str:
        """The reason why slices' results cannot be joined to that of the batch; "" if they can."""
        return self._rowless_reason or self.refusal

    @property
    def single_example_reason(self) -> str:
        """The reason why a slice of one example returns another shape; "" if it does not."""
        if not self.trace.squeezes:
            return ""
        one = self.tracer.traced_or_none(1)
        ranks = [[x.rank for x in trace.shapes if x] for trace in (self.trace, one) if trace]
        if len(ranks) == 2 and ranks[0] == ranks[1]:
            return ""
        return (
            "it squeezes all axes of size 1, also that of the batch where a tower has one example; "
            "name the axis, as in tf.squeeze(x, axis=-1)"
        )


def analyze(fn: Callable, batch: Sequence[Any]) -> FunctionAnalysis:
    """Analyze a tower function by a trace on one device.

    Args:
        fn: a tower function.
        batch: its arguments; of symbolic tensors the types and shapes are used.

    Raises:
        InputError: the function does what a tower may not.
    """
    return _analyze(Tracer(tf_internals.converted_as_here(fn), batch, reached_by(fn)))


@tf.autograph.experimental.do_not_convert
def _analyze(tracer: Tracer) -> FunctionAnalysis:
    with tf.init_scope():
        trace = tracer.first_trace()
    if trace is None:
        return FunctionAnalysis(tracer=tracer, reason=tracer.failure)
    draws = rng_layout.from_one_size(trace)
    if draws is None:  # other dimensions are multiples of its size, too
        with tf.init_scope():
            other = tracer.traced_or_none(trace.slice_sizes[0])
        draws = rng_layout.from_two_sizes(trace, other)
    return FunctionAnalysis(
        draws=draws,
        added=[AddedLoss(layer, "mean", rows) for layer, rows in trace.losses],
        static_rows=list(_with_static_rows(trace)),
        side_outputs=SideOutputs(trace.attributes, _policies_of_attributes(trace)),
        tracer=tracer,
        trace=trace,
    )


def unsplit(fn: Callable) -> FunctionAnalysis:
    """Return what is known of a function that is called once, with the whole batch."""
    return FunctionAnalysis(side_outputs=SideOutputs(reached=reached_by(fn)))


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
        inner = tf_internals.captured_as(graph, variable.handle)
        numbers = [] if inner is None else list(number_of_rows(inner))
        if numbers and all(number and number % trace.size for number in numbers):
            yield id(variable)


def _policies_of_attributes(trace: Trace) -> list[str | None]:
    def policy(x: Any) -> str | None:
        has_rows = not isinstance(x, tf.Tensor) or (x.shape.rank and x.shape[0] == trace.size)
        return ROWS if has_rows else "mean"

    return [policy(x) for x in trace.attribute_values]


def parts_of(fn: Callable, batch: Sequence[Any]) -> list[Any]:
    """Return the cache key of a function and its batch, a list to compare by `is` or ==.

    Args:
        fn: a tower function; its code, closure and defaults are in the key.
        batch: its arguments; structure, types, and shapes but for axis 0 are in the key.
    """
    shapes = []
    for leaf in tf.nest.flatten(list(batch)):
        shape = tf.TensorShape(getattr(leaf, "shape", None))
        of_each = shape.as_list()[1:] if shape.rank else None
        # An eager batch and a traced one have the same key: the first analysis serves both.
        kind = "Tensor" if isinstance(leaf, tf.Tensor) else type(leaf).__name__
        shapes.append((kind, getattr(leaf, "dtype", None), of_each))
    parts: list[Any] = [str((tf.nest.map_structure(lambda _: 0, list(batch)), shapes))]
    while fn is not None:
        code = getattr(fn, "__code__", None)  # of a method, too
        if code is None:
            return [*parts, fn]
        parts += [code, getattr(fn, "__self__", None), *(fn.__defaults__ or ())]
        parts += (fn.__kwdefaults__ or {}).values()
        for cell in fn.__closure__ or ():
            try:
                parts.append(cell.cell_contents)
            except ValueError:  # the cell is empty
                continue
        fn = getattr(fn, "__wrapped__", None)
    return parts
