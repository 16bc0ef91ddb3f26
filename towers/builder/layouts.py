"""Where the examples are in what a tower function draws, as its traces show it."""

import dataclasses

import numpy as np

from towers.builder.draws import WHOLE, Drawn, Layout
from towers.builder.tracing import Trace, Tracer, run

_EFFECT = 1e-4  # of the largest change: less is rounding


def from_shapes(few: Trace, more: Trace) -> list[Drawn]:
    """Return what the shapes of draws for two numbers of examples tell."""
    pairs = zip(few.draws, more.draws, strict=True)
    return [_drawn(a, b, few.size, more.size) for a, b in pairs]


def _drawn(few: tuple, more: tuple, few_size: int, more_size: int) -> Drawn:
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


def find_order(tracer: Tracer, few: Trace, draws: list[Drawn]) -> None:
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
    if folded:
        shapes = {place: few.draws[place][1] for place in folded}
        trace, inputs = tracer.trace(few.size, nudged=shapes), tracer.examples(few.size)
        for place, drawn in folded.items():
            layout = _order(trace, inputs, shapes, place, drawn)
            draws[place] = dataclasses.replace(drawn, layout=layout)


def _order(trace: Trace, inputs: list, shapes: dict, place: int, drawn: Drawn) -> Layout | None:
    """Return the layout of a draw, None if its numbers reach several examples in any order."""
    axis = drawn.layout.axis
    of_each = drawn.dims[axis][1]
    for inner in range(of_each, 0, -1):
        if of_each % inner == 0:
            owners = np.arange(shapes[place][axis]) // inner % trace.size
            ends = 0, trace.size - 1
            if all(_reaches_only(trace, inputs, shapes, place, axis, owners == e, e) for e in ends):
                return Layout(axis, None if inner == of_each else inner)
    return None


def _reaches_only(
    trace: Trace, inputs: list, shapes: dict, place: int, axis: int, own: np.ndarray, example: int
) -> bool:
    """Tell whether an example's own numbers change what is returned of it, and of no other."""
    nudges = {p: np.zeros(shape, np.int8) for p, shape in shapes.items()}
    np.moveaxis(nudges[place], axis, 0)[own] = 1
    low, high = (
        run(trace, inputs, nudges=[sign * nudge for nudge in nudges.values()])["rows"]
        for sign in (-1, 1)
    )
    change = np.max(np.abs(high - low), axis=1, initial=0)
    others = np.delete(change, example)
    return bool(change[example] > 0 and others.max() <= _EFFECT * change[example])
