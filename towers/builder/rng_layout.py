"""Finds the batch axis of each random draw of a tower function from its traces."""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from towers.builder.instrumentation import Trace, Tracer, run
from towers.builder.rng import WHOLE, BatchAxis, DrawInfo

_EFFECT = 1e-4  # relative to the largest change: less is rounding


def from_shapes(few: Trace, more: Trace) -> list[DrawInfo]:
    """Return the analysis of each draw, by its shapes for two numbers of examples.

    Args:
        few: trace of a function.
        more: trace of it for more examples, with the same draws.
    """
    infos = []
    for (op, shape, layer), (_, other, _) in zip(few.draws, more.draws, strict=True):
        known = shape is not None and other is not None and None not in (*shape, *other)
        if not known or len(shape) != len(other):
            infos.append(DrawInfo(op, None, None, layer))
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
        infos.append(DrawInfo(op, *known, layer))
    return infos


def find_order(tracer: Tracer, trace: Trace, draws: list[DrawInfo]) -> None:
    """Set the order of examples in draws with several numbers of an example along the batch axis.

    One example's numbers are replaced: the results of other examples must not change.

    Args:
        tracer: of the function.
        trace: of it, whose draws can be nudged.
        draws: as `from_shapes` returns them.
    """
    folded = [
        place
        for place, drawn in enumerate(draws)
        if drawn.layout and drawn.layout.axis is not None and drawn.dims[drawn.layout.axis][1] > 1
    ]
    candidates = {place: draws[place] for place in folded}
    for place in folded:
        draws[place] = dataclasses.replace(draws[place], layout=None)  # until it is found
    inputs = tracer.examples(trace.size) if folded else []

    def reaches_only(place: int, drawn: DrawInfo, example: int) -> bool:
        """Return whether perturbing an example's own numbers changes that example only."""
        low, high = (result["rows"] for result in nudged(trace, inputs, {place: drawn}, example))
        change = np.max(np.abs(high - low), axis=1, initial=0)
        others = np.delete(change, example)
        return bool(change[example] > 0 and others.max() <= _EFFECT * change[example])

    for place, drawn in candidates.items():
        axis = drawn.layout.axis
        of_each = drawn.dims[axis][1]
        for inner in range(of_each, 0, -1):
            layout = BatchAxis(axis, None if inner == of_each else inner)
            candidate = dataclasses.replace(drawn, layout=layout)
            ends = 0, trace.size - 1
            if of_each % inner == 0 and all(reaches_only(place, candidate, end) for end in ends):
                draws[place] = candidate
                break


def nudged(
    trace: Trace, inputs: Sequence[Any], draws: Mapping[int, DrawInfo], example: int
) -> list[dict[str, Any]]:
    """Return two results of `run`, with the least and the largest of an example's random numbers.

    Args:
        trace: of a function, whose draws can be nudged.
        inputs: from `Tracer.examples`.
        draws: {number of a draw: its analysis}, of those that are replaced.
        example: whose numbers are replaced.
    """
    nudges = [np.int8(0)] * trace.num_nudged
    for place, drawn in draws.items():
        axis, shape = drawn.layout.axis, trace.draws[place][1]
        inner = drawn.layout.inner or drawn.dims[axis][1]
        owners = np.arange(shape[axis]) // inner % trace.size
        nudges[place] = np.zeros(shape, np.int8)
        np.moveaxis(nudges[place], axis, 0)[owners == example] = 1
    return [run(trace, inputs, nudges=[sign * nudge for nudge in nudges]) for sign in (-1, 1)]
