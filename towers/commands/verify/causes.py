"""The likely cause of a difference: what the towers' graphs and layers give away."""

import dataclasses
from collections import Counter
from collections.abc import Callable, Iterator, Sequence

import keras
import tensorflow as tf

from towers import tf_private
from towers.builder import draws, exchange, faults, fetches
from towers.commands.verify.differences import Difference, kind_of
from towers.commands.verify.lane import Lane
from towers.data import Data
from towers.graphs.placement import Op, traced_ops
from towers.options.run import Options

_NARROW = (tf.float32, tf.float16, tf.bfloat16)


def likely_causes(
    first: Difference, options: Options, names: Sequence[str], dataset: Data, scaled: bool
) -> Iterator[str]:
    """Yield in one line each what most likely makes the first difference, the likeliest first.

    Args:
        first: to differ.
        options: of the runs that differ, in float64.
        names: the towers' devices, at least two if there are as many.
        dataset: of the runs.
        scaled: whether there is a loss scale.
    """
    if first.step < 0:
        yield "initial weights: no seed determines them; make them by Keras' initializers"
        return
    if cause := outside_of_towers(first):
        yield cause
        return
    names = names[: max(first.num_towers, 2)]
    even = options.batch_size - options.batch_size % len(names)  # slices of one size: one graph
    even_options = dataclasses.replace(options, batch_size=even or options.batch_size)
    lane = Lane(even_options, names, dataset, scaled)
    batch = next(iter(dataset.train.train_batches(options.batch_size, seed=options.seed)))
    rehearsal = lane.run.rehearse(batch)
    found = [*faults.find(rehearsal, tf.nest.flatten(batch), thorough=True), *lane.run.doubts]

    def differs_from_itself() -> bool:
        # A lane makes its weights by the run's seed, and its step by Python's own of this number.
        alone = [Lane(options, names[:1], dataset, scaled, seed) for seed in (1, 2)]
        losses = [lane.make_step(batch)["loss"] for lane in alone]
        return losses[0] != losses[1]

    local = options.batch_norm == "local" and "type --batch_norm=sync"
    ops = dict(traced_ops(lane.step.graph))
    yield from causes_in(first, lane.run.masters.model, found, ops, differs_from_itself, local)


def outside_of_towers(first: Difference) -> str | None:
    """Return the cause of a difference that is in evaluation, or in a metric, alone."""
    if kind_of(first.name) == "metric":
        return (
            f"metric: the loss is the same, and {first.name} is made once, of all outputs: so it "
            "draws, or keeps state in Python"
        )
    if kind_of(first.name) in ("evaluation", "prediction"):
        return (
            "evaluation: training is the same, so a layer mixes examples, draws or knows its tower "
            "with training=False alone"
        )
    return None


def causes_in(
    first: Difference,
    model: keras.Model,
    found: Sequence[str],
    ops: dict[str, tf.Operation],
    differs_from_itself: Callable[[], bool],
    local: str | bool,
) -> Iterator[str]:
    """Yield the causes of a difference in training.

    Args:
        first: to differ.
        model: on several towers.
        found: what is wrong with its tower function, in lines.
        ops: of its step, by name.
        differs_from_itself: tells whether two steps that are built on one device differ.
        local: what to write in place of local BatchNorm; false if it is not local.
    """
    if found and found[0].startswith("mixed"):
        yield found[0]
    yield from filter(faults.of_draws, found)
    yield from faults.random_ops_of(Op(name, op.type, "", "") for name, op in ops.items())
    if unlike := unlike_towers(ops):
        if differs_from_itself():
            yield (
                f"state in Python: {unlike}, and a step that is built twice on one "
                "device differs from itself; draw from a keras.random.SeedGenerator"
            )
        yield f"tower-dependent branch: {unlike}; a model may not know its tower"
    yield from found
    norms = keras.layers.BatchNormalization
    for layer in tf_private.layers_of(model):
        if isinstance(layer, norms) and local and not layer.synchronized:
            yield (f"local BatchNorm: {layer.path} takes its moments over a tower's slice; {local}")
    yield from narrow_casts(ops)
    if first.name in {f"model/{variable.path}" for variable in model.non_trainable_variables}:
        yield (
            f"state: the variable {first.name.partition('/')[2]} is assigned other values by other "
            'towers; make it with aggregation="sum" (of the changes), "mean" (by examples) or '
            '"only_first_replica"'
        )
    if differs_from_itself():
        yield (
            "state in Python: a step that is built twice on one device differs from itself, and "
            "its towers are alike: the loss, or what else is made of all outputs, draws or counts "
            "its calls"
        )
    yield "unknown: no random op, no local BatchNorm, no difference between the towers' graphs"


_MASTERS = ("Placeholder", "ReadVariableOp")  # as a tower has them


def unlike_towers(ops: dict[str, tf.Operation]) -> str | None:
    """Name the first layer whose ops or constants are not the same in every tower."""
    towers: dict[int, list[tuple]] = {}
    for name, op in ops.items():
        placed = Op(name, op.type, "", "")
        # Gradients share some constants; masters are read where they are; draws have places.
        placeful = any(part.SCOPE in name for part in (draws, exchange, fetches))
        known = name.startswith("gradient_tape") or placeful or op.type in _MASTERS
        if placed.tower is not None and not known:
            value = op.get_attr("value").SerializeToString() if op.type == "Const" else b""
            towers.setdefault(placed.tower, []).append((placed.layer, op.type, value))
    first = towers.pop(0, [])
    for tower, found in sorted(towers.items()):
        more, fewer = Counter(found) - Counter(first), Counter(first) - Counter(found)
        for layer, kind, _ in [s for s in found if s in more] + [s for s in first if s in fewer]:
            return f"layer {layer} is not the same in towers 0 and {tower} (its {kind})"
    return None


def narrow_casts(ops: dict[str, tf.Operation]) -> Iterator[str]:
    """Name the layers that cast to less than float64, although that is their policy here."""
    for name, op in ops.items():
        placed = Op(name, op.type, "", "")
        if placed.tower is None or op.type != "Cast" or op.inputs[0].dtype != tf.float64:
            continue
        if op.outputs[0].dtype in _NARROW:
            yield (
                f"rounding: layer {placed.layer} computes in {op.outputs[0].dtype.name} although "
                "the comparison is in float64; cast to the layer's compute_dtype instead, and make "
                "weights by add_weight without dtype"
            )
