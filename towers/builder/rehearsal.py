"""What a tower function does with its examples, found before the towers are built.

Towers are exact if each example is computed as on one device. Whether that is so, the function
itself does not say: this axis of a draw may be the batch or be as long by chance, that state may be
a sum or a mean. So it is rehearsed: traced for two numbers of examples, and what grows with them is
the batch. Where shapes do not tell, it is run on a few examples, one thing is changed, and what
follows from that is looked at.
"""

import contextlib
import dataclasses
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from towers import tf_private
from towers.builder import doubts, states
from towers.builder.draws import WHOLE, Drawn, Layout
from towers.builder.tracing import Trace, Tracer, run
from towers.errors import InputError

FEW, MORE = 3, 5  # examples of the two traces, if the function takes any number of them
_MULTIPLES = (1, 2, 4, 5, 7, 8, 10, 16)  # some functions take even numbers only, and so on
_NUM_KEPT = 4  # functions, of a training and its evaluation
_EFFECT = 1e-4  # of the largest change: less is rounding


@dataclasses.dataclass(frozen=True)
class Rehearsal:
    """What is known of a tower function."""

    draws: tuple[Drawn, ...] | None = None  # in order; None: it cannot be traced for few examples
    policies: dict[int, str] = dataclasses.field(default_factory=dict)  # see `states.policies_of`
    by_example: bool | None = None  # whether it returns a row for each example; None: unknown
    # Lines that say what several towers may not compute as one device does.
    doubts: list[str] = dataclasses.field(default_factory=list)
    tracer: Tracer | None = None
    few: Trace | None = None  # as it was traced first, if it could be


class Rehearsals:
    """Rehearses functions, keeps what was found of the last ones, and says what is in doubt."""

    def __init__(self, on_doubt: Callable[[str], None]):
        """Set who is told."""
        self._on_doubt = on_doubt
        self._told: set[str] = set()
        self._kept: list[tuple[list[Any], Rehearsal]] = []  # the newest first

    def find(self, fn: Callable, batch: Sequence[Any]) -> Rehearsal:
        """Return the rehearsal of a function, which may have been made anew of the same parts."""
        parts = parts_of(fn, batch)
        for before, found in self._kept:
            if len(parts) == len(before) and all(map(_is_same, parts, before)):
                return found
        found = rehearse(fn, batch)
        self._kept = [(parts, found), *self._kept[: _NUM_KEPT - 1]]
        return found

    def tell(self, lines: Iterable[str]) -> None:
        """Tell what has not been told yet."""
        for line in lines:
            if line not in self._told:
                self._told.add(line)
                self._on_doubt(line)


def parts_of(fn: Callable, batch: Sequence[Any]) -> list[Any]:
    """Return what makes a function and its batch: equal parts, by `is` or ==, mean the same.

    A loss function is often made anew in each step, of the same code around the same model.
    """
    shapes = []
    for leaf in tf.nest.flatten(list(batch)):
        shape = tf.TensorShape(getattr(leaf, "shape", None))
        of_each = shape.as_list()[1:] if shape.rank else None
        shapes.append((type(leaf).__name__, getattr(leaf, "dtype", None), of_each))
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


def _is_same(a: Any, b: Any) -> bool:
    """Tell whether two parts of a function are the same; tensors cannot be compared by ==."""
    return a is b or (isinstance(a, str | int | float) and type(a) is type(b) and a == b)


def rehearse(fn: Callable, batch: Sequence[Any]) -> Rehearsal:
    """Find out how `fn` draws, and what it does with the state that it assigns.

    Args:
        fn: a tower function.
        batch: its arguments; tensors of a graph stand for others of their type and shape.

    Raises:
        InputError: the function does what a tower may not; trying it has had its effects.
    """
    return _rehearse(tf_private.converted_as_here(fn), batch)


@tf.autograph.experimental.do_not_convert
def _rehearse(fn: Callable, batch: Sequence[Any]) -> Rehearsal:
    with tf.init_scope():
        tracer = Tracer(fn, batch)
        # The fewest examples that the function can be traced for.
        traces = (_trace(tracer, FEW * multiple) for multiple in _MULTIPLES)
        few = next(filter(None, traces), None)
        if few is None:
            return Rehearsal(tracer=tracer)
        draws, policies, why = [], {}, ""
        more = _trace(tracer, few.size // FEW * MORE) if few.draws or few.states else few
        if more is None or [draw[0] for draw in few.draws] != [draw[0] for draw in more.draws]:
            draws = [Drawn(op, None, None, layer) for op, _, layer in few.draws]
        elif more is not few:
            pairs = zip(few.draws, more.draws, strict=True)
            draws = [_drawn(a, b, few.size, more.size) for a, b in pairs]
            try:
                _find_order(tracer, few, draws)
                if few.states:
                    policies = states.policies_of(tracer, few, more, draws)
            except InputError:
                raise
            except Exception as error:
                line = (str(error).strip() or type(error).__name__).splitlines()[0]
                why = f" (it could not be tried: {line[:150]})"
        lines = doubts.random_ops(few.ops)
        lines += [doubts.ambiguous(drawn.layer, why) for drawn in draws if drawn.layout is None]
        untold = [variable for variable in few.states if id(variable) not in policies]
        lines += [doubts.not_put_together(variable, why) for variable in untold]
        lines = list(dict.fromkeys(lines))
        return Rehearsal(tuple(draws), policies, few.by_example, lines, tracer, few)


def _trace(tracer: Tracer, size: int) -> Trace | None:
    """Return the trace for so many examples, None if it fails: the towers will say why."""
    try:
        return tracer.trace(size)
    except InputError:
        raise
    except Exception:
        return None


# Where the examples are in a draw.


def _drawn(few: tuple, more: tuple, few_size: int, more_size: int) -> Drawn:
    """Return what the shapes of a draw for two numbers of examples tell."""
    op, shape, layer = few
    if None in (shape, more[1]) or len(shape) != len(more[1]) or None in [*shape, *more[1]]:
        return Drawn(op, None, None, layer)
    dims = []
    for a, b in zip(shape, more[1], strict=True):
        factor, rest = divmod(b - a, more_size - few_size)
        dims.append((a - factor * few_size, factor))
        if rest:
            return Drawn(op, None, None, layer)
    axes = [axis for axis, (_, factor) in enumerate(dims) if factor]
    layout = Layout(axes[0]) if axes else WHOLE
    if len(axes) > 1 or (axes and (dims[axes[0]][0] or dims[axes[0]][1] < 0)):
        layout = None
    return Drawn(op, tuple(dims), layout, layer)


def _find_order(tracer: Tracer, few: Trace, draws: list[Drawn]) -> None:
    """Set the order of examples in draws that have several numbers of each along the axis.

    One example's numbers are replaced: nothing else of what the function returns may change.
    """
    folded = {
        place: drawn
        for place, drawn in enumerate(draws)
        if drawn.layout and drawn.layout.axis is not None and drawn.dims[drawn.layout.axis][1] > 1
    }
    for place, drawn in folded.items():
        draws[place] = dataclasses.replace(drawn, layout=None)  # until it is found
    if not folded:
        return
    shapes = {place: few.draws[place][1] for place in folded}
    trace, inputs = tracer.trace(few.size, nudged=shapes), tracer.examples(few.size)

    def reaches_only(example: int, place: int, axis: int, inner: int) -> bool:
        """Tell whether an example's own numbers change what is returned of it, and of no other."""
        nudges = {p: np.zeros(shape, np.int8) for p, shape in shapes.items()}
        owners = np.arange(shapes[place][axis]) // inner % few.size
        np.moveaxis(nudges[place], axis, 0)[owners == example] = 1
        low, high = (
            run(trace, inputs, nudges=[sign * nudge for nudge in nudges.values()])["rows"]
            for sign in (-1, 1)
        )
        change = np.max(np.abs(high - low), axis=1, initial=0)
        others = np.delete(change, example)
        return bool(change[example] > 0 and others.max() <= _EFFECT * change[example])

    for place, drawn in folded.items():
        axis = drawn.layout.axis
        of_each = drawn.dims[axis][1]
        for inner in [n for n in range(of_each, 0, -1) if of_each % n == 0]:
            if all(reaches_only(e, place, axis, inner) for e in (0, few.size - 1)):
                layout = Layout(axis, None if inner == of_each else inner)
                draws[place] = dataclasses.replace(drawn, layout=layout)
                break
