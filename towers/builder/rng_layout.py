"""Finds the batch axis of each random op of a tower function from its traces."""

from collections.abc import Sequence

from towers.builder.rng import WHOLE, BatchAxis, DrawInfo
from towers.builder.traces import Trace


def from_one_size(trace: Trace) -> list[DrawInfo] | None:
    """Return the layout of each random op; None if one of them is unclear.

    The batch is the one axis that has as many elements as there are examples; without such an axis
    the numbers are for the whole batch.
    """
    infos, size = [], trace.size
    for op, dims, layer in trace.draws:
        if dims is None or None in dims:
            return None
        multiples = [dim for dim in dims if dim % size == 0]
        if multiples not in ([], [size]):
            return None
        layout = BatchAxis(dims.index(size)) if multiples else WHOLE
        known = tuple((0, 1) if dim == size else (dim, 0) for dim in dims)
        infos.append(DrawInfo(op, known, layout, layer, dims))
    return infos


def from_two_sizes(trace: Trace, other: Trace | None) -> list[DrawInfo]:
    """Return the layout of each random op; None in place of those that stay unclear.

    The batch is the one axis that grows with the number of examples. Several numbers of an example
    along it are taken for neighbours.

    Args:
        trace: of a function.
        other: of it for another number of examples; None if there is none.
    """
    unclear = [DrawInfo(op, None, None, layer) for op, _, layer in trace.draws]
    if other is None or [drawn[0] for drawn in trace.draws] != [drawn[0] for drawn in other.draws]:
        return unclear
    few, more = sorted((trace, other), key=lambda each: each.size)
    infos = []
    for unknown, (op, a, layer), (_, b, _) in zip(unclear, few.draws, more.draws, strict=True):
        if a is None or b is None or None in (*a, *b) or len(a) != len(b):
            infos.append(unknown)
            continue
        growth = [divmod(y - x, more.size - few.size) for x, y in zip(a, b, strict=True)]
        dims = tuple((x - f * few.size, f) for x, (f, _) in zip(a, growth, strict=True))
        axes = [axis for axis, (_, factor) in enumerate(dims) if factor]
        if any(rest for _, rest in growth):
            infos.append(unknown)
        elif len(axes) > 1 or (axes and (dims[axes[0]][0] or dims[axes[0]][1] < 0)):
            infos.append(DrawInfo(op, dims, None, layer))
        else:
            infos.append(DrawInfo(op, dims, BatchAxis(axes[0]) if axes else WHOLE, layer))
    return infos


def time_major(draws: Sequence[DrawInfo]) -> list[DrawInfo]:
    """Return the layouts with examples alternating where they have several numbers on an axis."""
    return [drawn.time_major() if drawn.is_folded else drawn for drawn in draws]
