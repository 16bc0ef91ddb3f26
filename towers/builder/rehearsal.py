"""What a tower function does with its examples, found by tracing and running it on a few of them.

Towers are exact if each example is computed as on one device. Whether that is so, the function
itself does not say: this axis of a draw may be the batch or be as long by chance, that state may be
a sum or a mean. So the function is traced for two numbers of examples, and what grows with them is
the batch. Where shapes do not tell, it is run on a few examples, one thing is changed, and what
follows from that is looked at (`stage`).
"""

import contextlib
import dataclasses
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from towers import tf_private
from towers.builder.assignments import merge
from towers.builder.draws import (
    OTHERS,
    PYTHON,
    SEEN,
    SEEN_OPS,
    USE_KERAS,
    WHOLE,
    Drawn,
    Layout,
    Rows,
)
from towers.builder.layers import layer_of
from towers.builder.stage import Stage, Take, run
from towers.errors import InputError

FEW, MORE = 3, 5  # examples of the two traces, if the function takes any number of them
_MULTIPLES = (1, 2, 4, 5, 7, 8, 10, 16)  # some functions take even numbers only, and so on
_EFFECT = 1e-4  # of the largest change: less is rounding
_SAME = 1e-4  # of the largest change of a state that is computed in two ways
_SAME_IN_FLOAT64 = 1e-8
_FAR = 100.0  # where running maxima and minima begin, too
_TRIALS = 12  # the last of two examples is the larger one by chance: half of the time
_POLICIES = ("first", "mean", "sum", "max", "min")


@dataclasses.dataclass(frozen=True)
class Rehearsal:
    """What is known of a tower function.

    Attributes:
        draws: in the order of its forward pass; None: it cannot be traced for a few examples.
        policies: {id of a variable that it assigns: how the towers' values make one}.
        untold: variables that it assigns, of which that cannot be told.
        kept: what the ids belong to.
        by_example: whether what it returns has a row for each example; None: unknown.
        reason: why the function could not be tried, "" if it could or need not.
        stage: where that was found.
        few: the function as it was traced there first; None: that failed.
    """

    draws: tuple[Drawn, ...] | None = None
    policies: dict[int, str] = dataclasses.field(default_factory=dict)
    untold: tuple[keras.Variable, ...] = ()
    kept: tuple[keras.Variable, ...] = ()
    by_example: bool | None = None
    reason: str = ""
    stage: Stage | None = None
    few: Take | None = None

    def doubts(self) -> list[str]:
        """Return in lines what several towers may not compute as one device does."""
        why = f" (it could not be tried: {self.reason})" if self.reason else ""
        found = random_ops(tf_private.ops_of(self.few.function.graph)) if self.few else []
        found += [ambiguous(d.layer, why) for d in self.draws or () if d.layout is None]
        found += [not_put_together(variable, why) for variable in self.untold]
        return list(dict.fromkeys(found))


def random_ops(ops: Iterable[tuple[str, str]]) -> list[str]:
    """Return a line for each layer whose draws do not follow the example.

    Args:
        ops: (name, type) of those that run in a tower.
    """
    found = {
        (layer_of(name), kind)
        for name, kind in ops
        if kind in OTHERS or kind in PYTHON or (kind in SEEN_OPS and SEEN not in name)
    }
    lines = []
    for layer, kind in sorted(found):
        if kind in PYTHON:
            lines.append(
                f"python code: layer {layer} calls Python while it runs ({kind}), of which nothing "
                "is known; write it in TensorFlow or keras.ops"
            )
        else:
            lines.append(
                f"random op: layer {layer} draws by {kind}, whose numbers do not follow the "
                f"example; {OTHERS.get(kind, USE_KERAS)}"
            )
    return lines


def ambiguous(layer: str, why: str = "") -> str:
    """Return the line for a draw whose layout cannot be told."""
    return (
        f"ambiguous draw: layer {layer} draws numbers of which it cannot be told to which example "
        f"they belong{why}; draw with the batch as the first axis, from a "
        "keras.random.SeedGenerator"
    )


def not_put_together(variable: keras.Variable, why: str = "") -> str:
    """Return the line for state of which it cannot be told how towers put it together."""
    return (
        f"state: the variable {variable.path} is assigned other values by other towers, and how "
        f'these make one cannot be told{why}; make it with aggregation="sum" (of the changes), '
        '"mean" (by examples) or "only_first_replica", or do not assign it in training'
    )


def parts_of(fn: Callable, batch: Sequence[Any]) -> list[Any]:
    """Return what makes a function and its batch: equal parts, by `is` or ==, mean the same.

    A loss function is often made anew in each step, of the same code around the same model.
    """
    shapes = [
        (type(leaf).__name__, getattr(leaf, "dtype", None), _row_shape(leaf))
        for leaf in tf.nest.flatten(list(batch))
    ]
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


def _row_shape(leaf: Any) -> list[int | None] | None:
    """Return the shape of an example, None if that is not known."""
    shape = tf.TensorShape(getattr(leaf, "shape", None))
    return shape.as_list()[1:] if shape.rank else None


def rehearse(fn: Callable, batch: Sequence[Any]) -> Rehearsal:
    """Find out how `fn` draws, and what it does with the state that it assigns.

    Args:
        fn: a tower function.
        batch: its arguments; tensors of a graph stand for others of their type and shape.
    """
    return _rehearse(tf_private.converted_as_here(fn), batch)


@tf.autograph.experimental.do_not_convert
def _rehearse(fn: Callable, batch: Sequence[Any]) -> Rehearsal:
    with tf.init_scope():
        return _found(Stage(fn, batch))


def _found(stage: Stage) -> Rehearsal:
    few = first_take(stage)
    if few is None:
        return Rehearsal(stage=stage)
    found = Rehearsal((), by_example=few.by_example, stage=stage, few=few, kept=tuple(few.states))
    if not few.draws and not few.states:
        return found
    more = _try(lambda: stage.take(few.size // FEW * MORE))
    if more is None or [draw[0] for draw in few.draws] != [draw[0] for draw in more.draws]:
        draws = tuple(Drawn(op, None, None, layer) for op, _, layer in few.draws)
        return dataclasses.replace(found, draws=draws, untold=tuple(few.states))
    draws = [_drawn(a, b, few.size, more.size) for a, b in zip(few.draws, more.draws, strict=True)]
    reasons, policies = [], {}
    draws = _with_order(stage, few, draws, reasons)
    with _noted(reasons):
        policies = _policies(stage, few, more, draws) if few.states else {}
    untold = tuple(variable for variable in few.states if id(variable) not in policies)
    reason = "; ".join(dict.fromkeys(reasons))
    return dataclasses.replace(
        found, draws=tuple(draws), policies=policies, untold=untold, reason=reason
    )


@contextlib.contextmanager
def _noted(reasons: list[str]) -> Iterator[None]:
    """Note why what is in the block fails, if it does."""
    try:
        yield
    except InputError:
        raise
    except Exception as error:
        lines = [line.strip() for line in str(error).splitlines() if line.strip()]
        reasons.append((lines or [type(error).__name__])[0][:150])


def first_take(stage: Stage) -> Take | None:
    """Return the take of the fewest examples that the function can be traced for, or None."""
    takes = (_try(lambda: stage.take(FEW * multiple)) for multiple in _MULTIPLES)  # noqa: B023
    return next(filter(None, takes), None)


def _try(fn: Callable) -> Any:
    """Return what `fn` returns, None if it fails: the towers themselves will say why.

    Raises:
        InputError: the function does what a tower may not; trying it has had its effects.
    """
    try:
        return fn()
    except InputError:
        raise
    except Exception:
        return None


# Draws.


def _drawn(few: tuple, more: tuple, few_size: int, more_size: int) -> Drawn:
    """Return what the shapes of a draw for two numbers of examples tell."""
    op, shape, name = few
    if shape is None or more[1] is None or len(shape) != len(more[1]):
        return Drawn(op, None, None, name)
    dims = []
    for a, b in zip(shape, more[1], strict=True):
        if a is None or b is None:
            return Drawn(op, None, None, name)
        factor, rest = divmod(b - a, more_size - few_size)
        dims.append((a - factor * few_size, factor))
        if rest:
            return Drawn(op, None, None, name)
    dims = tuple(dims)
    axes = [axis for axis, (_, factor) in enumerate(dims) if factor]
    if not axes:
        return Drawn(op, dims, WHOLE, name)
    if len(axes) > 1 or dims[axes[0]][0] or dims[axes[0]][1] < 0:
        return Drawn(op, dims, None, name)
    return Drawn(op, dims, Layout(axes[0]), name)


def _with_order(
    stage: Stage, few: Take, draws: Sequence[Drawn], reasons: list[str]
) -> list[Drawn]:
    """Find the order of examples in draws where each has several places along the axis."""
    axes = {
        place: drawn.layout.axis
        for place, drawn in enumerate(draws)
        if drawn.layout and drawn.layout.axis is not None and drawn.dims[drawn.layout.axis][1] > 1
    }
    if not axes:
        return list(draws)
    found = dict.fromkeys(axes)
    with _noted(reasons):
        take = stage.take(few.size, axes=axes)
        inputs = stage.examples(few.size)
        for place, axis in axes.items():
            found[place] = _order(take, inputs, place, axis, draws[place].dims[axis][1])
    return [dataclasses.replace(d, layout=found.get(i, d.layout)) for i, d in enumerate(draws)]


def _order(take: Take, inputs: list, place: int, axis: int, places: int) -> Layout | None:
    """Return the layout of a draw, None if its numbers reach several examples in any order.

    Args:
        take: with draws that can be nudged.
        inputs: of the take.
        place: of the draw.
        axis: of its examples.
        places: of each example, along that axis.
    """
    for inner in range(places, 0, -1):
        if places % inner == 0 and all(
            _reaches_only(take, inputs, (place, inner, e)) for e in (0, take.size - 1)
        ):
            return Layout(axis, None if inner == places else inner)
    return None


def _reaches_only(take: Take, inputs: list, nudge: tuple[int, int, int]) -> bool:
    """Tell whether the nudged numbers change what is returned of their example, and of no other."""
    low, high = (run(take, inputs, nudge=(*nudge, high))["rows"] for high in (False, True))
    change = np.max(np.abs(high - low), axis=1, initial=0)
    others = np.delete(change, nudge[2])
    return bool(change[nudge[2]] > 0 and others.max() <= _EFFECT * change[nudge[2]])


# State.


def _policies(stage: Stage, few: Take, more: Take, draws: Sequence[Drawn]) -> dict[int, str]:
    """Return how the values that several towers assign to variables make that of one device.

    The function is run on two slices and on both together, from several values of the variables.
    """
    sizes = few.size, more.size
    takes = two_and_both(stage, sizes, draws, few.states)
    possible, moved = {id(v): list(_POLICIES) for v in few.states}, set()
    for trial in range(_TRIALS):
        parts = [stage.examples(size, 2 * trial + i) for i, size in enumerate(sizes)]
        inputs = [*parts, [join(pair) for pair in zip(*parts, strict=True)]]
        offset = _FAR * (trial % 3 - 1)
        values = [v.numpy() for v in few.states]  # where a long run is, small changes are lost
        values = [v if np.max(np.abs(v), initial=0) < _FAR**2 else np.zeros_like(v) for v in values]
        before = [np.asarray(v + offset, v.dtype) for v in values]
        *own, both = (
            run(take, part, before)["states"] for take, part in zip(takes, inputs, strict=True)
        )
        for place, variable in enumerate(few.states):
            values = [found[place] for found in own]
            if not all(np.array_equal(v, before[place]) for v in (*values, both[place])):
                moved.add(id(variable))
            possible[id(variable)] = [
                policy
                for policy in possible[id(variable)]
                if agrees(policy, before[place], values, sizes, both[place])
            ]
    return {k: policies[0] for k, policies in possible.items() if policies and k in moved}


def two_and_both(
    stage: Stage,
    sizes: tuple[int, int],
    draws: Sequence[Drawn] | None,
    states: Sequence[Any] = (),
    backward: bool = False,
) -> list[Take]:
    """Return takes of two slices, and of the batch that they make, which draw alike.

    Args:
        stage: of the function.
        sizes: of the slices.
        draws: what is known of them.
        states: variables whose values are inputs.
        backward: see `Stage.take`.
    """
    total = sum(sizes)
    rows = [Rows(0, sizes[0], total), Rows(*sizes, total), Rows(0, total, total)]
    return [stage.take(r.size, rows=r, known=draws, states=states, backward=backward) for r in rows]


def agrees(policy: str, before: Any, values: Sequence[Any], counts: Any, both: Any) -> bool:
    """Tell whether a policy makes of the slices' values that of both together."""
    exact = np.asarray(both).dtype
    wide = [np.asarray(value, np.float64) for value in values]
    found = merge(policy, np.asarray(before, np.float64), list(map(tf.constant, wide)), counts)
    found, both = found.numpy(), np.asarray(both, np.float64)
    change = max(np.max(np.abs(v - before), initial=0) for v in (*wide, both))
    same = _SAME if exact.itemsize < 8 else _SAME_IN_FLOAT64
    allowed = 0.0
    if exact.kind == "f":
        allowed = same * change + 10 * np.finfo(exact).eps * np.max(np.abs(both), initial=0)
    return bool(np.max(np.abs(found - both), initial=0) <= allowed)


def join(parts: Sequence[Any]) -> Any:
    """Return the parts of a batch's leaf as one."""
    if isinstance(parts[0], tf.SparseTensor):
        return tf.sparse.concat(0, list(parts))
    return tf.concat(list(parts), axis=0)
