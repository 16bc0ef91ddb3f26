"""The analysis of what a tower function does with its examples, before the towers are built.

Towers are exact if each example is computed as on one device. Whether that is so, the function
itself does not say: this axis of a draw may be the batch or be as long by chance, that state may be
a sum or a mean. So it is rehearsed: traced for two numbers of examples, and what grows with them is
the batch. Where shapes do not tell, it is run on a few examples, and again with one thing changed.
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
from towers.builder.rng import DrawInfo
from towers.builder.synthetic_inputs import possible_shapes
from towers.errors import InputError

_MULTIPLES = (1, 2, 4, 5, 7, 8, 10, 16)  # some functions take even numbers only, and so on
_TRIALS = 6  # of shapes that values tell
_COLOUR = re.compile(r"\x1b\[\d+m")


@dataclasses.dataclass(frozen=True)
class FunctionAnalysis:
    """The analysis of a tower function."""

    draws: tuple[DrawInfo, ...] | None = None  # in order; None: it could not be traced
    policies: dict[int, str] = dataclasses.field(default_factory=dict)  # see `states.policies_of`
    untold: tuple[keras.Variable, ...] = ()  # that it assigns, and nothing tells how they merge
    by_example: bool | None = None  # whether it returns a row for each example; None: unknown
    reason: str = ""  # why it could not be tried, if it had to be
    # Ids of `tf.Variable`s whose sparse gradient has as many rows for any number of examples.
    fixed_rows: frozenset[int] = frozenset()
    tracer: Tracer | None = None
    few: Trace | None = None  # as it was traced first, if it could be
    added: tuple[AddedLoss, ...] = ()  # of the losses that layers add, in order

    @functools.cached_property
    def doubts(self) -> list[str]:
        """Lines about what several towers may not compute as one device does."""
        why = f" (it could not be tried: {self.reason})" if self.reason else ""
        ops = self.few.ops if self.few else []
        found = diagnostics.random_ops(ops) + diagnostics.tables(ops)
        found += [diagnostics.ambiguous(d.layer, why) for d in self.draws or () if d.layout is None]
        found += [diagnostics.not_put_together(variable, why) for variable in self.untold]
        found += [diagnostics.added_loss(a.layer, a.reason) for a in self.added if a.policy is None]
        return list(dict.fromkeys(found))

    @functools.cached_property
    def side_outputs(self) -> SideOutputs:
        """The attributes that the function changes, and how those of several towers are joined."""
        left, policies = self.few.left if self.few else [], []
        if left:
            with tf.init_scope():
                policies = state_aggregation.policies_of_left(self.tracer, self.few, self.draws)
        return SideOutputs(left, policies)

    @functools.cached_property
    def against_joining(self) -> str:
        """Why what slices return does not make that of the batch, whatever the batch; "" if so."""
        if any(self.few.strays):
            return f"its output {self.few.strays.index(True)} has no row for each example"
        places = [i for i, x in enumerate(self.few.shapes) if x and not x.is_fully_defined()]
        with contextlib.suppress(Exception), tf.init_scope():
            trials = []
            for trial in range(_TRIALS):
                examples = self.tracer.examples(self.few.size, trial)
                if not trial:
                    examples = [tf.nest.map_structure(tf.zeros_like, x) for x in examples]
                trials.append(run(self.few, examples)["shapes"])
            sizes = zip(*trials, strict=True)
            for place, found in zip(places, sizes, strict=True):
                if any(len(x) == 0 or x[0] != self.few.size for x in found):
                    return f"how many rows its output {place} has, the values of examples tell"
                if len({tuple(x) for x in found}) > 1:
                    return (
                        f"how long its output {place} is, the values of a batch tell, as by "
                        "to_tensor() of ragged rows or a cut at the longest; give it a fixed size"
                    )
        return ""

    @functools.cached_property
    def against_one_example(self) -> str:
        """Why a slice of one example returns something else; "" if it does not."""
        if not self.few.squeezes:
            return ""
        one = _trace(self.tracer, 1)
        ranks = [[x.rank for x in trace.shapes if x] for trace in (self.few, one) if trace]
        if len(ranks) == 2 and ranks[0] == ranks[1]:
            return ""
        return (
            "it squeezes all axes of size 1, also that of the batch where a tower has one example; "
            "name the axis, as in tf.squeeze(x, axis=-1)"
        )


def parts_of(fn: Callable, batch: Sequence[Any]) -> list[Any]:
    """Return the parts of a function and its batch; equal parts, by `is` or ==, mean the same."""
    shapes = []
    for leaf in tf.nest.flatten(list(batch)):
        shape = tf.TensorShape(getattr(leaf, "shape", None))
        of_each = shape.as_list()[1:] if shape.rank else None
        # What was tried with the values of a batch is known while a step is traced, too.
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
            with contextlib.suppress(ValueError):  # it is empty yet
                parts.append(cell.cell_contents)
        fn = getattr(fn, "__wrapped__", None)
    return parts


def rehearse(fn: Callable, batch: Sequence[Any]) -> FunctionAnalysis:
    """Find out how `fn` draws, and what it does with the state that it assigns.

    Args:
        fn: a tower function.
        batch: its arguments; tensors of a graph stand for others of their type and shape.

    Raises:
        InputError: the function does what a tower may not; trying it has had its effects.
    """
    held = [part for part in parts_of(fn, ()) if isinstance(part, keras.Layer)]
    layers = [layer for own in held for layer in tf_internals.layers_of(own)]
    return _rehearse(Tracer(tf_internals.converted_as_here(fn), batch, layers))


@tf.autograph.experimental.do_not_convert
def _rehearse(tracer: Tracer) -> FunctionAnalysis:
    with tf.init_scope():
        reasons: list[str] = []
        few = _trace_few(tracer)
        if few is None:
            return FunctionAnalysis(tracer=tracer, reason=tracer.failure)
        tracer.learn_values(few)
        found = FunctionAnalysis((), by_example=few.by_example, tracer=tracer, few=few)
        if not few.draws and not few.states and not few.num_rows:
            return dataclasses.replace(found, added=_added(tracer, few, ()))
        more = _trace(tracer, few.size // FEW * MORE)
        if more is not None:
            same = (k for k, rows in few.num_rows.items() if rows and rows == more.num_rows.get(k))
            found = dataclasses.replace(found, fixed_rows=frozenset(same))
        if more is None or [draw[0] for draw in few.draws] != [draw[0] for draw in more.draws]:
            draws = tuple(DrawInfo(op, None, None, layer) for op, _, layer in few.draws)
            added = _added(tracer, few, draws)
            return dataclasses.replace(found, draws=draws, untold=tuple(few.states), added=added)
        draws, policies = rng_layout.from_shapes(few, more), {}
        with _failure_noted(reasons):
            rng_layout.find_order(tracer, few, draws)
        if few.states:
            with _failure_noted(reasons):
                policies = state_aggregation.policies_of(tracer, few, draws)
        untold = tuple(variable for variable in few.states if id(variable) not in policies)
        return dataclasses.replace(
            found, draws=tuple(draws), policies=policies, untold=untold,
            reason="; ".join(dict.fromkeys(reasons)), added=_added(tracer, few, draws),
        )  # fmt: skip


def _added(tracer: Tracer, few: Trace, draws: Sequence[DrawInfo]) -> tuple[AddedLoss, ...]:
    reasons = []
    with _failure_noted(reasons):
        return tuple(state_aggregation.of_added(tracer, few, draws)) if few.adding else ()
    return tuple(AddedLoss(layer, None, False, *reasons) for layer in few.adding)


def _trace_few(tracer: Tracer) -> Trace | None:
    """Return the trace of the fewest examples that the function can be traced for, or None.

    Where lengths are unknown, it is for those with which all that is returned has rows.
    """
    fallback = None
    for shapes in possible_shapes(tracer.real or tracer.batch, tracer.layers):
        tracer.shapes = shapes
        traces = (_trace(tracer, FEW * multiple) for multiple in _MULTIPLES)
        if found := next(filter(None, traces), None):
            if not any(found.strays):
                return found
            fallback = fallback or (found, shapes)
    found, tracer.shapes = fallback or (None, tracer.shapes)
    return found


def _trace(tracer: Tracer, size: int) -> Trace | None:
    """Return the trace for so many examples, None if it fails: the towers will say why."""
    reasons: list[str] = []
    with _failure_noted(reasons):
        return tracer.trace(size, sparse=True)
    (tracer.failure,) = reasons
    return None


@contextlib.contextmanager
def _failure_noted(reasons: list[str]) -> Iterator[None]:
    """Add to `reasons` the first telling line of an error in the block, and go on after it."""
    try:
        yield
    except InputError:
        raise
    except Exception as error:
        lines = [_COLOUR.sub("", line).strip() for line in str(error).splitlines()]
        # Keras' errors begin with where they were raised.
        told = [x for x in lines if x and not x.startswith("Exception encountered when")]
        reasons.append((told or [type(error).__name__])[0][:150])
