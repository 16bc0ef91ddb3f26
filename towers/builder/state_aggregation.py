"""Finds how to aggregate the values that towers assign to a variable, by trial runs.

Each function takes a `FunctionAnalysis`, whose tracer, trace and draws are set already.
"""

import contextlib
from collections.abc import Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from towers.builder.added_losses import AddedLoss
from towers.builder.attributes import ROWS
from towers.builder.gather import join
from towers.builder.instrumentation import Trace, Tracer, run
from towers.builder.variable_aggregation import merge, policy_of

_SAME = 1e-4  # relative tolerance of a state that is computed in two ways
_SAME_IN_FLOAT64 = 1e-8
_FAR = 100.0  # a start far from the data shows running maxima and minima
_TRIALS = 12  # in one trial the last of two examples is the larger one by chance
_LARGE = 30.0  # examples of every second round of trials show what rounds or clips
_TRIALS_OF_LOSSES = 3
_POLICIES = ("first", "mean", "sum", "max", "min")


def policies_of(analysis: Any) -> dict[int, str]:
    """Return {id of a variable: its policy of `merge`}, without variables that none fits.

    The function is run on two slices and on both together, from several values of the variables.
    """
    tracer, few = analysis.tracer, analysis.trace
    traces = tracer.slice_traces(few, analysis.draws)
    possible, changed = {id(v): _POLICIES for v in few.states}, set()
    values = [v.numpy() for v in few.states]
    # A large value would hide small changes.
    near = [v if np.max(np.abs(v), initial=0) < _FAR**2 else np.zeros_like(v) for v in values]
    for trial in range(_TRIALS):
        shift = trial % 3 - 1
        before = [np.asarray(v + _FAR * shift, v.dtype) for v in near]
        try:
            results = [result["states"] for result in _run_slices(tracer, traces, trial, before)]
        except tf.errors.InvalidArgumentError:
            if shift or _are_large(trial):  # a value that it cannot take, as a negative length
                continue
            raise
        for variable, start, *after in zip(few.states, before, *results, strict=True):
            if not all(np.array_equal(value, start) for value in after):
                changed.add(id(variable))
            possible[id(variable)] = _agreeing(possible[id(variable)], start, after, traces, trial)
    # One that did not change may do so for other examples, if it depends on examples: of such the
    # variable's own aggregation is believed.
    independent = zip(few.states, few.data_independent, strict=True)
    known = changed | {id(v) for v, is_independent in independent if is_independent}
    own = {id(v): policy_of(v) for v in few.states}
    chosen = {k: next(iter(p), None) if k in known else own[k] for k, p in possible.items()}
    return {k: policy for k, policy in chosen.items() if policy in possible[k]}


def policies_of_losses(analysis: Any) -> list[AddedLoss]:
    """Return for each loss that layers add how the slices' values combine."""
    tracer, few = analysis.tracer, analysis.trace
    traces = tracer.slice_traces(few, analysis.draws)
    possible = [("mean", "sum")] * len(few.loss_layers)
    reasons = ["it is not finite for made-up examples"] * len(few.loss_layers)
    alone = [True] * len(few.loss_layers)  # whether a row of the loss affects one row of the result
    for trial in range(_TRIALS_OF_LOSSES):
        results = _run_slices(tracer, traces, trial)
        for place, (*parts, both) in enumerate(zip(*(f["added"] for f in results), strict=True)):
            parts.append(np.float32(both))  # parts may have been computed in float32
            if np.all(np.isfinite(parts)):  # infinite sums and means are alike
                reasons[place] = ""
                possible[place] = _agreeing(possible[place], 0.0, parts, traces, trial)
        for place, rows in enumerate(zip(*(f["alone"] for f in results), strict=True)):
            alone[place] &= all(rows)
    by_example = [all(rows) for rows in zip(*(t.added_by_example for t in traces), strict=True)]
    return [
        AddedLoss(layer, None, rows, reason)
        if reason
        else AddedLoss(layer, "rows" if is_alone and policies else next(iter(policies), None), rows)
        for layer, policies, is_alone, rows, reason in zip(
            few.loss_layers, possible, alone, by_example, reasons, strict=True
        )
    ]


def policies_of_attributes(analysis: Any) -> list[str | None]:
    """Return for each tensor in an attribute how the slices' values combine; None: unknown.

    A tensor with a row for each example is joined, the others are aggregated as states are.
    """
    tracer, few = analysis.tracer, analysis.trace
    if not few.attribute_shapes:
        return []

    def have_rows(traces: Sequence[Trace]) -> list[bool]:
        shapes = [[s is None or s[:1] == [t.size] for s in t.attribute_shapes] for t in traces]
        return list(map(all, zip(*shapes, strict=True)))

    by_rows = have_rows([few])
    with contextlib.suppress(Exception):  # then shapes for few examples are all that is known
        traces = tracer.slice_traces(few, analysis.draws)
        by_rows = have_rows(traces)
        possible = {place: _POLICIES for place, rows in enumerate(by_rows) if not rows}
        for trial in range(_TRIALS if possible else 0):
            results = [result["attributes"] for result in _run_slices(tracer, traces, trial)]
            for place, policies in possible.items():
                *parts, both = (result[place] for result in results)
                kind, alike = both.dtype.kind, all(x.shape == both.shape for x in parts)
                policies = [p for p in policies if p != "mean" or kind == "f"]
                policies = policies if alike and kind in "fiu" else []
                start = np.zeros_like(both)
                possible[place] = _agreeing(policies, start, [*parts, both], traces, trial)
        return [
            next(iter(possible[place]), None) if place in possible else ROWS
            for place in range(len(by_rows))
        ]
    return [ROWS if rows else None for rows in by_rows]


def _run_slices(
    tracer: Tracer, traces: Sequence[Trace], trial: int, before: Sequence[Any] = ()
) -> list[dict[str, Any]]:
    parts = [tracer.examples(trace.size, 2 * trial + i) for i, trace in enumerate(traces[:2])]
    if _are_large(trial):
        parts = [[x * _LARGE if x.dtype.is_floating else x for x in part] for part in parts]
    inputs = [*parts, [join(pair) for pair in zip(*parts, strict=True)]]
    return [run(trace, part, before) for trace, part in zip(traces, inputs, strict=True)]


def _are_large(trial: int) -> bool:
    return trial % 6 >= 3  # each three begin from three values of the variables


def _agreeing(
    policies: Sequence[str], before: Any, values: Sequence[Any], traces: Sequence[Trace], trial: int
) -> Sequence[str]:
    # The policies by which the first two of `values`, the slices', give the last, of both together.
    exact = np.asarray(values[-1]).dtype
    *parts, both = (np.asarray(value, np.float64) for value in values)
    if _are_large(trial) and not all(np.all(np.isfinite(v)) for v in (*parts, both)):
        return policies
    change = max(np.max(np.abs(v - before), initial=0) for v in (*parts, both))
    allowed = 0.0
    if exact.kind == "f":
        same = _SAME if exact.itemsize < 8 else _SAME_IN_FLOAT64
        allowed = same * change + 10 * np.finfo(exact).eps * np.max(np.abs(both), initial=0)
    sizes, wide = [trace.size for trace in traces[:2]], np.asarray(before, np.float64)
    merged = {p: merge(p, wide, list(map(tf.constant, parts)), sizes).numpy() for p in policies}
    return [p for p, v in merged.items() if np.max(np.abs(v - both), initial=0) <= allowed]
