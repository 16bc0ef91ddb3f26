"""The report of verify: the differences, and their most likely cause."""

import dataclasses
import itertools
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import keras
import tensorflow as tf

from towers import tf_internals
from towers.builder.device_names import NO_LAYER, layer_of
from towers.builder.function_analysis import is_unchecked
from towers.commands.verify.differences import (
    TOLERANCE,
    TOLERANCES,
    Difference,
    compare,
    differences,
    kind_of,
)
from towers.commands.verify.runner import Runner
from towers.devices.gpus import precision
from towers.formatting import table
from towers.graphs.placement import traced_ops
from towers.training.step.train_state import variables_of

SHOWN = 12  # arrays in the table
_NARROW = (tf.float32, tf.float16, tf.bfloat16)


def verify_runners(
    reference: Runner,
    runners: Sequence[Runner],
    batches: Sequence[Any],
    test: Any,
    say: Callable[[str], None],
    tolerance: float | None = None,
) -> dict[str, Any]:
    """Compare towers with one device, see `compare`; print the report, and return its JSON.

    `tolerance` is the largest relative difference that passes; None: that of the dtype.
    """
    if reference.dtype != "float64":
        for line in precision():
            say(line)
    tolerance = tolerance or TOLERANCES[reference.dtype]
    found = list(compare(reference, runners, batches, test, say, tolerance))
    rows, kinds, first_difference = _largest(str, found), _largest(kind_of, found), None
    rows = dict(sorted(rows.items(), key=lambda item: -max(item[1].values())))
    largest, numbers = _largest(lambda _: "", found)[""], Counter(map(kind_of, rows))
    titles = {kind: f"{kind}, of {n}" if n > 1 else kind for kind, n in numbers.items()}
    shown = [(titles[kind], row) for kind, row in kinds.items()] + list(rows.items())[:SHOWN]
    cells = [[name, *(f"{value:.1e}" for value in row.values())] for name, row in shown]
    for line in table(["largest relative difference, towers:", *largest], cells):
        say(f"  {line}")
    if failed := [d for d in found if not d.relative_difference <= tolerance]:
        first = min(failed, key=lambda d: d.step)  # the order within a step is kept
        cause = _likely_cause(reference, runners, batches[0], first)
        first_difference = dataclasses.asdict(first) | {"cause": cause}
        when = f"at step {first.step}" if first.step >= 0 else "before the first step"
        say(
            f"FAILED      {first.name} is the first to differ, by {first.relative_difference:.1e} "
            f"{when} with {first.num_towers} towers"
        )
        say(f"likely      {cause}")
    else:
        most = max(largest.values())
        say(f"passed      the largest relative difference is {most:.1e}, below {tolerance:g}")
    return {
        "passed": not failed,
        "first_difference": first_difference,
        "max_relative_difference": largest,
        "differences": rows,
        "dtype": reference.dtype,
    }


def _largest(key: Callable[[str], str], found: Sequence[Difference]) -> dict[str, dict]:
    """Return {key(name): {"2": the largest difference on two towers}}, in the order of `found`."""
    numbers, result = dict.fromkeys(str(d.num_towers) for d in found), {}
    for d in found:
        row = result.setdefault(key(d.name), dict.fromkeys(numbers, 0.0))
        row[str(d.num_towers)] = max(row[str(d.num_towers)], d.relative_difference)
    return result


def _likely_cause(
    reference: Runner, runners: Sequence[Runner], batch: Any, first: Difference
) -> str:
    """Return the most likely cause of the first difference, as one line."""
    kind = kind_of(first.name)
    if first.step < 0:
        return "initial weights: they do not follow the seed; create them with Keras initializers"
    if kind == "metric":
        return (
            f"metric: the loss is the same, and {first.name} is computed once, from all outputs, "
            "so it uses random numbers or keeps state in Python"
        )
    if kind in ("evaluation", "prediction"):
        return (
            "evaluation: training is the same, so only with training=False a layer mixes examples, "
            "uses random numbers or depends on its tower"
        )
    several = (r for r in runners if r.num_towers >= max(first.num_towers, 2))
    runner, graph = next(several, runners[-1]), reference.graph(batch)
    if again := _assigned_in_backward(graph, reference.model):
        return (
            f"recomputation: plain Keras assigns {again} twice when it recomputes a layer for the "
            "gradient (keras.remat, tf.recompute_grad), so it uses another dropout mask than the "
            "loss, or updates statistics twice; towers assign it once; do not recompute random "
            "layers or BatchNorm"
        )
    builder = runner.builder
    local = builder.accumulate_steps > 1 and "accumulate_steps=1"
    local = 'batch_norm="sync"' if builder.batch_norm == "local" else local
    for layer in tf_internals.layers_of(runner.model) if local else ():
        if isinstance(layer, keras.layers.BatchNormalization) and not layer.synchronized:
            flag = local.replace('"', "")
            return (
                f"local BatchNorm: {layer.path} uses the statistics of a tower's slice, or of a "
                f"microbatch; type --{flag}, or in Python {local}"
            )
    fn, arguments = runner.tower_function(batch)
    lines = builder.check(fn, (), *arguments)
    if lines and not is_unchecked(lines[0]):
        return lines[0]
    if _differs_from_itself(reference, batch):
        return (
            "random op: one device gets another result when it repeats a step with the same "
            "variables, so the step has random numbers without a fixed seed; use a "
            "keras.random.SeedGenerator"
        )
    for name, op in traced_ops(graph):
        narrow = op.type == "Cast" and op.outputs[0].dtype in _NARROW
        if narrow and op.inputs[0].dtype == tf.float64 and layer_of(name) != NO_LAYER:
            return (
                f"rounding: layer {layer_of(name)} computes in {op.outputs[0].dtype.name} although "
                "the comparison is in float64; cast to the layer's compute_dtype instead, and call "
                "add_weight without dtype"
            )
    unknown = (
        "unknown: two towers on one device agree, and one device repeats its step; perhaps the "
        "model depends on its device, or the loss keeps state in Python"
    )
    return [*lines, unknown][0]


def _differs_from_itself(reference: Runner, batch: Any) -> bool:
    before, seen = reference.variables(), []
    for _ in range(2):
        reference.set_variables(before)
        seen.append(reference.make_step(batch))
    reference.set_variables(before)
    again = differences(*seen, num_towers=1, step=0)
    return any(not d.relative_difference <= TOLERANCE for d in again)


def _assigned_in_backward(graph: tf.Graph, model: keras.Model) -> str | None:
    """Return the first variable that a step on one device assigns in its backward pass, or None."""
    ops = graph.get_operations()  # in the order in which they were made
    # Recomputation is a custom gradient.
    if not any(b"CustomGradient" in op.node_def.attr["_gradient_op_type"].s for op in ops):
        return None
    outer = {id(inner): id(handle) for handle, inner in graph.captures}
    non_trainable = [v for v in variables_of(model) if not v.trainable]
    states = {id(v.value.handle): v.path for v in non_trainable}
    backward = itertools.dropwhile(lambda op: not op.name.startswith("gradient_tape"), ops)
    assigned = (op for op in backward if op.type.startswith("Assign"))
    paths = (states.get(outer.get(id(op.inputs[0]))) for op in assigned)
    return next(filter(None, paths), None)
