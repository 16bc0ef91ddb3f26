"""The analysis of how a tower function treats its examples, before the towers are built.

Towers are exact if they compute each example as one device does. For that they must know which axis
of a random tensor is the batch, and whether a state is a sum or a mean. So the function is traced
for two numbers of examples: axes that grow with them are the batch. Where shapes do not decide, it
is run on a few examples, and again with one thing changed.
"""

import contextlib
import dataclasses
import functools
import re
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import keras
import tensorflow as tf

from towers import tf_internals
from towers.builder import diagnostics, rng_layout, state_aggregation
from towers.builder.added_losses import AddedLoss
from towers.builder.attributes import SideOutputs
from towers.builder.instrumentation import FEW, MORE, Trace, Tracer, run
from towers.builder.namespaces import Namespace, reached_by
from towers.builder.rng import DrawInfo
from towers.builder.synthetic_inputs import possible_shapes
from towers.builder.variable_aggregation import policy_of
from towers.errors import InputError

_MULTIPLES = (1, 2, 4, 5, 7, 8, 10, 16)  # some functions take even numbers only, and so on
_TRIALS = 6  # of shapes that depend on values
_COLOUR = re.compile(r"\x1b\[\d+m")


@dataclasses.dataclass(frozen=True)
class FunctionAnalysis:
    """The analysis of a tower function."""

    draws: tuple[DrawInfo, ...] | None = None  # in order; None: the function could not be traced
    policies: dict[int, str] = dataclasses.field(default_factory=dict)  # of states, by id
    unknown_states: tuple[keras.Variable, ...] = ()  # states of unknown aggregation
    by_example: bool | None = None  # whether it returns a row for each example; None: unknown
    reason: str = ""  # why trial runs failed
    static_rows: Sequence[int] = ()  # ids of `tf.Variable`s: see `gather.StaticIndexedSlices`
    tracer: Tracer | None = None
    trace: Trace | None = None  # for few examples, if the function could be traced
    more: Trace | None = None  # for more examples, with draws that can be nudged
    added: tuple[AddedLoss, ...] = ()  # the losses that layers add, in order
    reached: Sequence[Namespace] = ()  # by a function of one slice, which needs no analysis

    @functools.cached_property
    def warnings(self) -> list[str]:
        """Lines on what several towers may compute otherwise than one device."""
        why = f" (it could not be tried: {self.reason})" if self.reason else ""
        ops = self.trace.ops if self.trace else []
        lines = diagnostics.random_ops(ops) + diagnostics.tables(ops)
        lines += [diagnostics.ambiguous(d.layer, why) for d in self.draws or () if d.layout is None]
        lines += [diagnostics.unknown_aggregation(state, why) for state in self.unknown_states]
        lines += [diagnostics.added_loss(a.layer, a.reason) for a in self.added if a.policy is None]
        unique = self.trace.unique_rows if self.trace else ()
        lines += map(diagnostics.unique_lookups, unique)
        return list(dict.fromkeys(lines))

    @functools.cached_property
    def side_outputs(self) -> SideOutputs:
        """The attributes that the function sets, and how to join those of several towers."""
        trace, policies = self.trace, []
        if trace and trace.attributes:
            with tf.init_scope():
                policies = state_aggregation.policies_of_attributes(self)
        return SideOutputs(trace.attributes if trace else [], policies, self.reached)

    @property
    def not_joined(self) -> list[str]:
        """Lines on tensors that the function leaves and that cannot be joined."""
        holders, policies = self.trace.holders if self.trace else (), self.side_outputs.policies
        pairs = zip(holders, policies, strict=False)
        return [diagnostics.not_joined(holder) for holder, policy in pairs if policy is None]

    def check_joinable(self, any_number_of_rows: bool = False) -> None:
        """Raise InputError if the function's results cannot be joined along the batch.

        With `any_number_of_rows` an example may have several, or none.
        """
        if self.trace is None:
            return
        if reason := self._rowless_reason if any_number_of_rows else self.unjoinable_reason:
            raise InputError(
                f"what the towers' function returns cannot be joined along the batch: {reason}; "
                "compute that from the joined outputs"
            )

    @property
    def _rowless_reason(self) -> str:
        if any(self.trace.not_by_example):
            return f"its output {self.trace.not_by_example.index(True)} has no row for each example"
        if (place := self._square_output()) is not None:
            return f"its output {place} has an axis for the other examples of the batch, too"
        return ""

    @functools.cached_property
    def unjoinable_reason(self) -> str:
        """The reason why slices' results cannot be joined to that of the batch; "" if they can."""
        if self._rowless_reason:
            return self._rowless_reason
        places = [i for i, x in enumerate(self.trace.shapes) if x and not x.is_fully_defined()]
        with contextlib.suppress(Exception), tf.init_scope():
            trials = []
            for trial in range(_TRIALS):
                examples = self.tracer.examples(self.trace.size, trial)
                if not trial:
                    examples = [tf.nest.map_structure(tf.zeros_like, x) for x in examples]
                trials.append(run(self.trace, examples)["shapes"])
            sizes = zip(*trials, strict=True)
            for place, shapes in zip(places, sizes, strict=True):
                if any(len(x) == 0 or x[0] != self.trace.size for x in shapes):
                    return f"how many rows its output {place} has, the values of examples tell"
                if len({tuple(x) for x in shapes}) > 1:
                    return (
                        f"how long its output {place} is, the values of a batch tell, as by "
                        "to_tensor() of ragged rows or a cut at the longest; give it a fixed size"
                    )
        return ""

    def _square_output(self) -> int | None:
        """Return the place of an output in which more than the first axis grows with the batch."""
        few = self.trace

        def grows(place: int) -> bool:
            shape = few.shapes[place]
            return bool(shape) and any(d and d % few.size == 0 for d in shape[1:])

        if not any(map(grows, range(len(few.shapes)))):
            return None
        more = self.more or _trace(self.tracer, few.size // FEW * MORE)
        pairs = zip(few.shapes, more.shapes if more else (), strict=False)
        return next((i for i, (a, b) in enumerate(pairs) if a and b and a[1:] != b[1:]), None)

    @functools.cached_property
    def single_example_reason(self) -> str:
        """The reason why a slice of one example returns another shape; "" if it does not."""
        if not self.trace.squeezes:
            return ""
        one = _trace(self.tracer, 1)
        ranks = [[x.rank for x in trace.shapes if x] for trace in (self.trace, one) if trace]
        if len(ranks) == 2 and ranks[0] == ranks[1]:
            return ""
        return (
            "it squeezes all axes of size 1, also that of the batch where a tower has one example; "
            "name the axis, as in tf.squeeze(x, axis=-1)"
        )


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
            with contextlib.suppress(ValueError):  # the cell is empty
                parts.append(cell.cell_contents)
        fn = getattr(fn, "__wrapped__", None)
    return parts


def analyze(fn: Callable, batch: Sequence[Any]) -> FunctionAnalysis:
    """Analyze a tower function's random ops, states and added losses.

    Args:
        fn: a tower function.
        batch: its arguments; of symbolic tensors the types and shapes are used.

    Raises:
        InputError: the function does what a tower may not; its side effects have happened.
    """
    return _analyze(Tracer(tf_internals.converted_as_here(fn), batch, reached_by(fn)))


@tf.autograph.experimental.do_not_convert
def _analyze(tracer: Tracer) -> FunctionAnalysis:
    with tf.init_scope():
        reasons: list[str] = []
        few = _trace_few(tracer)
        if few is None:
            return FunctionAnalysis(tracer=tracer, reason=tracer.failure)
        tracer.learn_values(few)
        analysis = FunctionAnalysis((), by_example=few.by_example, tracer=tracer, trace=few)
        if not few.draws and not few.states and not few.num_rows:
            return dataclasses.replace(analysis, added=_added(analysis))
        more = _trace(tracer, few.size // FEW * MORE, num_nudged=len(few.draws))
        if more is not None:
            same = [k for k, rows in few.num_rows.items() if rows and rows == more.num_rows.get(k)]
            analysis = dataclasses.replace(analysis, static_rows=same)
        if more is None or [draw[0] for draw in few.draws] != [draw[0] for draw in more.draws]:
            draws = tuple(DrawInfo(op, None, None, layer) for op, _, layer in few.draws)
            states = tuple(v for v in few.states if not policy_of(v))
            analysis = dataclasses.replace(analysis, draws=draws, unknown_states=states)
            return dataclasses.replace(analysis, added=_added(analysis))
        draws, policies = rng_layout.from_shapes(few, more), {}
        with _failure_recorded(reasons):
            rng_layout.find_order(tracer, more, draws)
        analysis = dataclasses.replace(analysis, draws=tuple(draws), more=more)
        if few.states:
            with _failure_recorded(reasons):
                policies = state_aggregation.policies_of(analysis)
        # Without a trial a metric is a sum, as Keras says of all.
        unknown = (v for v in few.states if not (id(v) in policies or (reasons and policy_of(v))))
        return dataclasses.replace(
            analysis, policies=policies, unknown_states=tuple(unknown),
            reason="; ".join(dict.fromkeys(reasons)), added=_added(analysis),
        )  # fmt: skip


def _added(analysis: FunctionAnalysis) -> tuple[AddedLoss, ...]:
    layers, reasons = analysis.trace.loss_layers, []
    with _failure_recorded(reasons):
        return tuple(state_aggregation.policies_of_losses(analysis)) if layers else ()
    return tuple(AddedLoss(layer, None, False, *reasons) for layer in layers)


def _trace_few(tracer: Tracer) -> Trace | None:
    """Return the trace of the fewest examples that the function can be traced for, or None.

    Where lengths are unknown, it is for those with which all that is returned has rows.
    """
    fallback = None
    batch_sizes = [leaf.shape[:1] for leaf in tracer.real or tracer.batch]  # it may take no other
    sizes = [FEW * multiple for multiple in _MULTIPLES if [FEW * multiple] not in batch_sizes]
    owners = (namespace.owner for namespace in tracer.reached)
    layers = [owner for owner in owners if isinstance(owner, keras.Layer)]
    for shapes in possible_shapes(tracer.real or tracer.batch, layers):
        tracer.shapes = shapes
        if trace := next(filter(None, (_trace(tracer, size) for size in sizes)), None):
            if not any(trace.not_by_example):
                return trace
            fallback = fallback or (trace, shapes)
    trace, tracer.shapes = fallback or (None, tracer.shapes)
    return trace


def _trace(tracer: Tracer, size: int, num_nudged: int = 0) -> Trace | None:
    reasons: list[str] = []
    with _failure_recorded(reasons):  # the towers will raise the error
        return tracer.trace(size, num_nudged=num_nudged, sparse=True)
    (tracer.failure,) = reasons
    return None


@contextlib.contextmanager
def _failure_recorded(reasons: list[str]) -> Iterator[None]:
    """Suppress an error in the block; append its first informative line to `reasons`."""
    try:
        yield
    except InputError:
        raise
    except Exception as error:
        lines = [_COLOUR.sub("", line).strip() for line in str(error).splitlines()]
        # Keras' errors begin with where they were raised.
        lines = [x for x in lines if x and not x.startswith("Exception encountered when")]
        reasons.append((lines or [type(error).__name__])[0][:150])
