"""Finds the batch axis of each random draw of a tower function from its traces."""

import dataclasses

import numpy as np

from towers.builder.instrumentation import Trace, Tracer, run
from towers.builder.rng import WHOLE, BatchAxis, DrawInfo

_EFFECT = 1e-4  # relative to the largest change: less is rounding


def from_shapes(few: Trace, more: Trace) -> list[DrawInfo]:
    """Analyze draws by their shapes for two numbers of examples."""
    found = []
    for (op, shape, layer), (_, other, _) in zip(few.draws, more.draws, strict=True):
        known = shape is not None and other is not None and None not in (*shape, *other)
        if not known or len(shape) != len(other):
            found.append(DrawInfo(op, None, None, layer))
            continue
        growth = [divmod(b - a, more.size - few.size) for a, b in zip(shape, other, strict=True)]
        dims = tuple(
            (a - factor * few.size, factor) for a, (factor, _) in zip(shape, growth, strict=True)
        )
        axes = [axis for axis, (_, factor) in enumerate(dims) if factor]
        layout = BatchAxis(axes[0]) if axes else WHOLE
        if len(axes) > 1 or (axes and (dims[axes[0]][0] or dims[axes[0]][1] < 0)):
            layout = None
        linear = not any(rest for _, rest in growth)
        known = (dims, layout) if linear else (None, None)
        found.append(DrawInfo(op, *known, layer))
    return found


def find_order(tracer: Tracer, few: Trace, draws: list[DrawInfo]) -> None:
    """Set the order of examples in draws with several numbers of an example along the batch axis.

    One example's numbers are replaced: the results of other examples must not change.
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

    def reaches_only(place: int, axis: int, own: np.ndarray, example: int) -> bool:
        """Return whether perturbing an example's own numbers changes that example only."""
        nudges = {p: np.zeros(shape, np.int8) for p, shape in shapes.items()}
        np.moveaxis(nudges[place], axis, 0)[own] = 1
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
        for inner in range(of_each, 0, -1):
            owners = np.arange(shapes[place][axis]) // inner % trace.size
            ends = 0, trace.size - 1
            if of_each % inner == 0 and all(
                reaches_only(place, axis, owners == end, end) for end in ends
            ):
                layout = BatchAxis(axis, None if inner == of_each else inner)
                draws[place] = dataclasses.replace(drawn, layout=layout)
                break
