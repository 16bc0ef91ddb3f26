"""The likely cause of a difference: what the towers' graphs and layers give away."""

import dataclasses
import functools
from collections import Counter
from collections.abc import Callable, Iterator, Sequence

import keras
import tensorflow as tf

from towers import tf_private
from towers.builder import draws, exchange
from towers.commands.verify.differences import Difference, kind_of
from towers.commands.verify.lane import EvaluationLane, Lane
from towers.data import Data
from towers.graphs.placement import Op, traced_ops
from towers.options.run import Options
from towers.training import faults

_NARROW = (tf.float32, tf.float16, tf.bfloat16)


def likely_cause(
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
    kind = EvaluationLane if kind_of(first.name) == "evaluation" else Lane
    make_lane = functools.partial(kind, dataset=dataset, scaled=scaled)
    return next(_causes(first, options, names, dataset, make_lane))


def _causes(
    first: Difference, options: Options, names: Sequence[str], dataset: Data, make_lane: Callable
) -> Iterator[str]:
    """Yield all causes that are found, the likeliest first."""
    even = options.batch_size - options.batch_size % len(names)  # slices of one size: one graph
    lane = make_lane(dataclasses.replace(options, batch_size=even or options.batch_size), names)
    ops = dict(traced_ops(lane.step.graph))
    model = lane.run.masters.model
    batch = next(iter(dataset.train.train_batches(options.batch_size, seed=options.seed)))
    found = [*faults.find(lane.run.rehearse(batch), batch, thorough=True), *lane.run.doubts]
    if found and found[0].startswith("mixed"):
        yield found[0]
    yield from filter(faults.of_draws, found)
    yield from faults.random_ops_of(Op(name, op.type, "", "") for name, op in ops.items())
    if unlike := unlike_towers(ops):
        # A lane makes its weights by the run's seed, and its step by Python's own of this number.
        alone = [make_lane(options, names[:1], python_seed=seed) for seed in (1, 2)]
        losses = [lane.make_step(batch)["loss"] for lane in alone]
        if losses[0] != losses[1]:
            yield (
                f"state in Python: {unlike}, and a step that is built twice on one "
                "device differs from itself; draw from a keras.random.SeedGenerator"
            )
        yield f"tower-dependent branch: {unlike}; a model may not know its tower"
    yield from found
    if options.batch_norm == "local":
        yield from local_batch_norm(model)
    yield from narrow_casts(ops)
    yield from narrow_weights(model)
    if first.name in {f"model/{variable.path}" for variable in model.non_trainable_variables}:
        yield (
            f"state: the variable {first.name.partition('/')[2]} is assigned other values by other "
            'towers; make it with aggregation="sum" (of the changes), "mean" (by examples) or '
            '"only_first_replica"'
        )
    yield "unknown: no random op, no local BatchNorm, no difference between the towers' graphs"


def unlike_towers(ops: dict[str, tf.Operation]) -> str | None:
    """Name the first layer whose ops or constants are not the same in every tower."""
    towers: dict[int, list[tuple]] = {}
    for name, op in ops.items():
        placed = Op(name, op.type, "", "")
        # Gradients share some constants; a placeholder is a master; draws have places.
        placeful = draws.SCOPE in name or exchange.SCOPE in name
        known = name.startswith("gradient_tape") or op.type == "Placeholder" or placeful
        if placed.tower is not None and not known:
            value = op.get_attr("value").SerializeToString() if op.type == "Const" else b""
            towers.setdefault(placed.tower, []).append((placed.layer, op.type, value))
    first = towers.pop(0, [])
    for tower, found in sorted(towers.items()):
        more, fewer = Counter(found) - Counter(first), Counter(first) - Counter(found)
        for layer, kind, _ in [s for s in found if s in more] + [s for s in first if s in fewer]:
            return f"layer {layer} is not the same in towers 0 and {tower} (its {kind})"
    return None


def local_batch_norm(model: keras.Model) -> Iterator[str]:
    """Name the BatchNorm layers whose moments are those of a slice."""
    for layer in tf_private.layers_of(model):
        if isinstance(layer, keras.layers.BatchNormalization) and not layer.synchronized:
            yield (
                f"local BatchNorm: {layer.path} takes its moments over a tower's slice; type "
                "--batch_norm=sync"
            )


def narrow_casts(ops: dict[str, tf.Operation]) -> Iterator[str]:
    """Name the layers that cast to less than float64, although that is their policy here."""
    for name, op in ops.items():
        placed = Op(name, op.type, "", "")
        forward = placed.tower is not None and not name.startswith("gradient_tape")
        if not (forward and op.type == "Cast" and op.inputs[0].dtype == tf.float64):
            continue
        if op.outputs[0].dtype in _NARROW:
            yield (
                f"rounding: layer {placed.layer} computes in {op.outputs[0].dtype.name} although "
                "the comparison is in float64; cast to the layer's compute_dtype instead"
            )


def narrow_weights(model: keras.Model) -> Iterator[str]:
    """Name the weights that are kept in less than float64."""
    for weight in model.trainable_variables:
        if weight.value.dtype in _NARROW:
            yield (
                f"rounding: weight {weight.path} is kept in {weight.dtype} although the comparison "
                "is in float64; make it by add_weight without dtype"
            )
