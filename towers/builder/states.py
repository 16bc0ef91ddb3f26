"""How the values that towers assign to a variable make that of one device, as trials show it."""

import contextlib
from collections.abc import Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from towers.builder.added_losses import AddedLoss
from towers.builder.attributes import ROWS
from towers.builder.draws import Drawn
from towers.builder.merging import merge
from towers.builder.tracing import Trace, Tracer, run

_SAME = 1e-4  # of the largest change of a state that is computed in two ways
_SAME_IN_FLOAT64 = 1e-8
_FAR = 100.0  # where running maxima and minima begin, too
_TRIALS = 12  # the last of two examples is the larger one by chance: half of the time
_TRIALS_OF_ADDED = 3
_POLICIES = ("first", "mean", "sum", "max", "min")


def policies_of(tracer: Tracer, few: Trace, draws: Sequence[Drawn]) -> dict[int, str]:
    """Return {id of a variable: how several towers' values make one}, of those that can be told.

    The function is run on two slices and on both together, from several values of the variables.
    """
    traces = tracer.two_and_both(few, draws)
    sizes = [trace.size for trace in traces[:2]]
    possible, moved = {id(v): list(_POLICIES) for v in few.states}, set()
    for trial in range(_TRIALS):
        before = _start(few.states, _FAR * (trial % 3 - 1))
        *own, both = (found["states"] for found in _tried(tracer, traces, trial, before))
        for place, variable in enumerate(few.states):
            values = [found[place] for found in own]
            if not all(np.array_equal(v, before[place]) for v in (*values, both[place])):
                moved.add(id(variable))
            possible[id(variable)] = [
                policy
                for policy in possible[id(variable)]
                if agrees(policy, before[place], values, sizes, both[place])
            ]
    # One that did not change may do so for examples that were not tried, if they have a part in it.
    told = moved | {id(v) for v, apart in zip(few.states, few.apart, strict=True) if apart}
    return {k: policies[0] for k, policies in possible.items() if policies and k in told}


def _start(states: Sequence[Any], offset: float) -> list[np.ndarray]:
    """Return values near those of variables; where a long run is, small changes are lost."""
    values = [v.numpy() for v in states]
    near = [v if np.max(np.abs(v), initial=0) < _FAR**2 else np.zeros_like(v) for v in values]
    return [np.asarray(v + offset, v.dtype) for v in near]


def of_added(tracer: Tracer, few: Trace, draws: Sequence[Drawn]) -> list[AddedLoss]:
    """Return of each loss that layers add how slices' losses make that of both together."""
    traces = tracer.two_and_both(few, draws)
    sizes = [trace.size for trace in traces[:2]]
    possible = [["mean", "sum"] for _ in few.adding]
    alone = [True] * len(few.adding)  # whether a row of the loss is of one row of the result
    for trial in range(_TRIALS_OF_ADDED):
        found = _tried(tracer, traces, trial)
        for place, (*own, both) in enumerate(zip(*(f["added"] for f in found), strict=True)):
            both = np.float32(both)  # parts of it may have been computed in that
            possible[place] = [p for p in possible[place] if agrees(p, 0.0, own, sizes, both)]
        for place, rows in enumerate(zip(*(f["alone"] for f in found), strict=True)):
            alone[place] &= all(rows)
    by_example = [all(rows) for rows in zip(*(t.added_by_example for t in traces), strict=True)]
    return [
        AddedLoss(layer, "rows" if own and policies else next(iter(policies), None), rows)
        for layer, policies, own, rows in zip(few.adding, possible, alone, by_example, strict=True)
    ]


def _tried(
    tracer: Tracer, traces: Sequence[Trace], trial: int, before: Sequence[Any] = ()
) -> list[dict[str, Any]]:
    """Return what `run` gives for two slices and for both together, of examples of this trial."""
    parts = [tracer.examples(trace.size, 2 * trial + i) for i, trace in enumerate(traces[:2])]
    inputs = [*parts, [join(pair) for pair in zip(*parts, strict=True)]]
    return [run(trace, part, before) for trace, part in zip(traces, inputs, strict=True)]


def policies_of_left(
    tracer: Tracer, few: Trace, draws: Sequence[Drawn] | None
) -> list[str | None]:
    """Return how slices' tensors in attributes make those of the batch; None: it cannot be told.

    A tensor with a row for each example is joined, the others go together as states do.
    """
    if not few.shapes_left:
        return []
    found = [_rows_if(few)]
    with contextlib.suppress(Exception):  # then shapes for few examples are all that is known
        traces = tracer.two_and_both(few, draws)
        found = list(map(_rows_if, traces))
        others = [i for i, kinds in enumerate(zip(*found, strict=True)) if not all(kinds)]
        if others:
            policies = _possible(tracer, traces, others)
            return [policies.get(i, ROWS) for i in range(len(few.shapes_left))]
    return [ROWS if all(kinds) else None for kinds in zip(*found, strict=True)]


def _rows_if(trace: Trace) -> list[bool]:
    """Tell of each tensor that is left whether it has as many rows as there are examples."""
    return [shape is None or shape[:1] == [trace.size] for shape in trace.shapes_left]


def _possible(
    tracer: Tracer, traces: Sequence[Trace], places: Sequence[int]
) -> dict[int, str | None]:
    """Return how slices' tensors at places make that of both together, in all trials."""
    possible = {place: list(_POLICIES) for place in places}
    sizes = [trace.size for trace in traces[:2]]
    for trial in range(_TRIALS):
        results = [found["left"] for found in _tried(tracer, traces, trial)]
        for place in places:
            *own, both = (found[place] for found in results)
            alike = both.dtype.kind in "fiu" and all(x.shape == both.shape for x in own)
            before = np.zeros_like(both)
            possible[place] = [
                policy
                for policy in (possible[place] if alike else ())
                if (policy != "mean" or both.dtype.kind == "f")
                and agrees(policy, before, own, sizes, both)
            ]
    return {place: next(iter(policies), None) for place, policies in possible.items()}


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
