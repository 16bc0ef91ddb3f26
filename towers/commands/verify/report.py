"""The report of verify: the differences, and their most likely cause."""

import dataclasses
import itertools
import random
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from towers import tf_internals
from towers.builder import cross_host, rng, sync
from towers.commands.verify.differences import (
    NUDGE_PART,
    TOLERANCES,
    Difference,
    compare,
    kind_of,
)
from towers.commands.verify.runner import Runner, batched, rows_in
from towers.devices.gpus import precision
from towers.formatting import table
from towers.graphs.placement import Op, traced_ops
from towers.training.step.train_state import variables_of

SHOWN = 12  # arrays in the table
_NARROW = (tf.float32, tf.float16, tf.bfloat16)
_WEIGHT_OPS = ("Placeholder", "ReadVariableOp")  # how towers get a weight's value


def verify_runners(
    reference: Runner,
    runners: Sequence[Runner],
    batches: Iterable[Any],
    test: Any,
    num_steps: int,
    say: Callable[[str], None],
    tolerance: float | None = None,
) -> dict[str, Any]:
    """Compare towers with one device, print the report, and return its JSON.

    Args:
        reference: the runner on one device.
        runners: runners on towers, in ascending order of their number.
        batches: see `compare`.
        test: see `compare`.
        num_steps: see `compare`.
        say: called with each line to print.
        tolerance: the largest relative difference that passes; None: that of the dtype.
    """
    if reference.dtype != "float64":
        for line in precision():
            say(line)
    tolerance = tolerance or TOLERANCES[reference.dtype]
    how = batches, test, num_steps, say, tolerance, tolerance * NUDGE_PART
    differences = list(compare(reference, runners, *how))
    rows = largest_by_array(differences, "relative_difference")
    largest, first_difference = largest_by_towers(rows), None
    lines = {}
    for kind in dict.fromkeys(kind_of(d.name) for d in differences):
        group = {name: row for name, row in rows.items() if kind_of(name) == kind}
        title = kind if len(group) == 1 else f"{kind}, of {len(group)}"
        lines[title] = largest_by_towers(group)
    shown = [*lines.items(), *itertools.islice(rows.items(), SHOWN)]
    cells = [[name, *(f"{value:.1e}" for value in row.values())] for name, row in shown]
    for line in table(["largest relative difference, towers:", *largest], cells, widest=100):
        say(f"  {line}")
    if failed := [d for d in differences if not d.relative_difference <= tolerance]:
        first = min(failed, key=lambda d: d.step)  # the order within a step is kept
        cause = _likely_cause(reference, runners, next(iter(batches)), first)
        first_difference = dataclasses.asdict(first) | {"cause": cause}
        when = f"at step {first.step}" if first.step >= 0 else "before the first step"
        say(
            f"FAILED      {first.name} is the first to differ, by {first.relative_difference:.1e} "
            f"{when} on {first.num_towers} towers"
        )
        say(f"likely      {cause}")
    else:
        most = max(largest.values())
        say(f"passed      the largest relative difference is {most:.1e}, under {tolerance:g}")
    return {
        "passed": not failed,
        "first_difference": first_difference,
        "max_relative_difference": largest,
        "differences": rows,
        "dtype": reference.dtype,
    }


def largest_by_array(differences: Sequence[Difference], field: str) -> dict[str, dict[str, float]]:
    """Return {name: {"2": its largest difference on two towers}}, the largest first.

    Args:
        differences: differences of all steps and runners.
        field: "relative_difference" or "ulps".
    """
    numbers, result = dict.fromkeys(str(d.num_towers) for d in differences), {}
    for d in differences:
        row = result.setdefault(d.name, dict.fromkeys(numbers, 0.0))
        row[str(d.num_towers)] = max(row[str(d.num_towers)], getattr(d, field))
    return dict(sorted(result.items(), key=lambda item: -max(item[1].values())))


def largest_by_towers(rows: Mapping[str, Mapping[str, float]]) -> dict[str, float]:
    """Return {"2": the largest difference on two towers} of any array."""
    numbers = next(iter(rows.values()))
    return {number: max(row[number] for row in rows.values()) for number in numbers}


def _likely_cause(
    reference: Runner, runners: Sequence[Runner], batch: Any, first: Difference
) -> str:
    """Return the most likely cause of the first difference, as one line."""
    kind = kind_of(first.name)
    if first.step < 0:
        return "initial weights: no seed determines them; make them by Keras' initializers"
    if kind == "metric":
        return (
            f"metric: the loss is the same, and {first.name} is made once, of all outputs: so it "
            "draws, or keeps state in Python"
        )
    if kind in ("evaluation", "prediction"):
        return (
            "evaluation: training is the same, so a layer mixes examples, draws or knows its tower "
            "with training=False alone"
        )
    several = (r for r in runners if r.num_towers >= max(first.num_towers, 2))
    runner = next(several, runners[-1])
    model, builder, faults = runner.model, runner.builder, runner.exactness_warnings(batch)
    if faults and faults[0].startswith("mixed"):
        return faults[0]
    rows = rows_in(batch)
    even = rows - rows % builder.num_slices or rows  # slices of one size: one graph
    graph, _ = runner.trace(next(iter(batched(batch, even))))
    ops = [(Op(name, op.type, "", ""), op) for name, op in traced_ops(graph)]
    if unlike := _unlike_towers(ops):
        if _differs_from_itself(reference, batch):
            return (
                f"state in Python: {unlike}, and a step that is built twice on one "
                "device differs from itself; draw from a keras.random.SeedGenerator"
            )
        return f"tower-dependent branch: {unlike}; a model may not know its tower"
    if faults:
        return faults[0]
    if again := _assigned_in_backward(reference, batch):
        return (
            f"recomputation: plain Keras assigns {again} once more when it computes a layer again "
            "for the gradient (keras.remat, tf.recompute_grad), so it draws another mask than that "
            "of the loss, or moves statistics twice; towers do so once, and have the gradient of "
            "the loss; keep draws and BatchNorm out of what is recomputed"
        )
    local = builder.accumulate_steps > 1 and "accumulate_steps=1"
    local = 'batch_norm="sync"' if builder.batch_norm == "local" else local
    for layer in tf_internals.layers_of(model) if local else ():
        if isinstance(layer, keras.layers.BatchNormalization) and not layer.synchronized:
            flag = local.replace('"', "")
            return (
                f"local BatchNorm: {layer.path} takes its moments over a tower's slice, or a part "
                f"of it; type --{flag}, or in a program give {local}"
            )
    for placed, op in ops:
        cast = placed.tower is not None and op.type == "Cast" and op.inputs[0].dtype == tf.float64
        if cast and op.outputs[0].dtype in _NARROW:
            return (
                f"rounding: layer {placed.layer} computes in {op.outputs[0].dtype.name} although "
                "the comparison is in float64; cast to the layer's compute_dtype instead, and make "
                "weights by add_weight without dtype"
            )
    if first.name in {f"model/{variable.path}" for variable in model.non_trainable_variables}:
        return (
            f"state: the variable {first.name.partition('/')[2]} is assigned other values by other "
            'towers; make it with aggregation="sum" (of the changes), "mean" (by examples) or '
            '"only_first_replica"'
        )
    if _differs_from_itself(reference, batch):
        return (
            "state in Python: a step that is built twice on one device differs from itself, and "
            "its towers are alike: the loss, or what else is made of all outputs, draws or counts "
            "its calls"
        )
    return "unknown: no random op, no local BatchNorm, no difference between the towers' graphs"


def _differs_from_itself(reference: Runner, batch: Any) -> bool:
    before, seen = reference.variables(), []
    for seed in (1, 2):
        reference.assign(before)
        random.seed(seed)
        np.random.seed(seed)
        seen.append(reference.trace(batch)[1])
    reference.assign(before)
    return not all(map(np.array_equal, *seen))


def _assigned_in_backward(reference: Runner, batch: Any) -> str | None:
    """Return the first variable that one device assigns in its backward pass, or None."""
    graph, _ = reference.trace(batch)
    ops = graph.get_operations()  # in the order in which they were made
    # Recomputation is a custom gradient.
    if not any(b"CustomGradient" in op.node_def.attr["_gradient_op_type"].s for op in ops):
        return None
    outer = {id(inner): id(handle) for handle, inner in graph.captures}
    non_trainable = [v for v in variables_of(reference.model) if not v.trainable]
    states = {id(v.value.handle): v.path for v in non_trainable}
    backward = itertools.dropwhile(lambda op: not op.name.startswith("gradient_tape"), ops)
    assigned = (op for op in backward if op.type.startswith("Assign"))
    paths = (states.get(outer.get(id(op.inputs[0]))) for op in assigned)
    return next(filter(None, paths), None)


def _unlike_towers(ops: Sequence[tuple[Op, tf.Operation]]) -> str | None:
    """Return a sentence about the first layer whose ops or constants differ between towers."""
    towers: dict[int, list[tuple]] = {}
    for placed, op in ops:
        # Towers share constants of gradients, read weights differently, and draw by position.
        scopes = rng.SCOPE, sync.SCOPE, cross_host.FETCHED
        placeful = any(scope in placed.name for scope in scopes)
        known = placed.name.startswith("gradient_tape") or placeful or op.type in _WEIGHT_OPS
        if placed.tower is not None and not known:
            value = op.get_attr("value").SerializeToString() if op.type == "Const" else b""
            towers.setdefault(placed.tower, []).append((placed.layer, op.type, value))
    first = towers.pop(0, [])
    for tower, other in sorted(towers.items()):
        more, fewer = Counter(other) - Counter(first), Counter(first) - Counter(other)
        for layer, kind, _ in [s for s in other if s in more] + [s for s in first if s in fewer]:
            return f"layer {layer} is not the same in towers 0 and {tower} (its {kind})"
    return None
