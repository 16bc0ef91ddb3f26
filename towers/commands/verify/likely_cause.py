"""The likely cause of a difference that `towers verify` found."""

from collections.abc import Sequence

import tensorflow as tf

from towers.commands.verify.causes import likely_cause
from towers.commands.verify.differences import Difference, kind_of
from towers.commands.verify.lane import EvaluationLane, Lane
from towers.data import Data
from towers.graphs.placement import Op, traced_ops
from towers.options.run import Options

_NARROW = (tf.float32, tf.float16, tf.bfloat16)


def cause_of(
    first: Difference, options: Options, names: Sequence[str], dataset: Data, scaled: bool
) -> str:
    """Return in one line what most likely makes the first difference.

    Args:
        first: to differ.
        options: of the runs that differ, in float64.
        names: the towers' devices, at least two if there are as many.
        dataset: of the runs.
        scaled: whether there is a loss scale.
    """
    if first.step < 0:
        return "initial weights: no seed determines them; make them by Keras' initializers"
    names = names[: max(first.num_towers, 2)]
    make_lane = EvaluationLane if kind_of(first.name) == "evaluation" else Lane
    cause = likely_cause(options, names, dataset, make_lane, scaled)
    if not cause.startswith("unknown"):
        return cause
    lane = make_lane(options, names, dataset, scaled)
    return rounding(lane) or state(first, lane) or cause


def state(first: Difference, lane: Lane) -> str | None:
    """Name a variable that towers assign, if that is what differs first."""
    variables = lane.run.masters.model.non_trainable_variables
    if first.name not in {f"model/{variable.path}" for variable in variables}:
        return None
    return (
        f"state: the variable {first.name.partition('/')[2]} is assigned other values by other "
        'towers; make it with aggregation="sum" (of the changes), "mean" (by examples) or '
        '"only_first_replica"'
    )


def rounding(lane: Lane) -> str | None:
    """Name what keeps fewer digits than float64, although its layer's policy is float64 here."""
    for name, op in traced_ops(lane.step.graph):
        placed = Op(name, op.type, "", "")
        forward = placed.tower is not None and not name.startswith("gradient_tape")
        if not (forward and op.type == "Cast" and op.inputs[0].dtype == tf.float64):
            continue
        if op.outputs[0].dtype in _NARROW:
            return (
                f"rounding: layer {placed.layer} computes in {op.outputs[0].dtype.name} although "
                "the comparison is in float64; cast to the layer's compute_dtype instead"
            )
    for weight in lane.run.masters.model.trainable_variables:
        if weight.value.dtype in _NARROW:
            return (
                f"rounding: weight {weight.path} is kept in {weight.dtype} although the comparison "
                "is in float64; make it by add_weight without dtype"
            )
    return None
