"""Why towers differ from one device: what their graphs and layers give away."""

import dataclasses
from collections import Counter
from collections.abc import Callable, Sequence

import keras
import tensorflow as tf

from towers import tf_private
from towers.builder import draws, exchange
from towers.data import Data
from towers.graphs.placement import Op, traced_ops
from towers.options.run import Options
from towers.training import faults


def likely_cause(
    options: Options, names: Sequence[str], dataset: Data, make_lane: Callable, scaled: bool
) -> str:
    """Return in one line what most likely makes towers on the devices `names` differ.

    Args:
        options: of the runs that differ.
        names: one device for each tower.
        dataset: of the runs.
        make_lane: `make_lane(options, names, dataset, scaled)` builds a run as verify does.
        scaled: whether there is a loss scale.
    """
    even = options.batch_size - options.batch_size % len(names)  # slices of one size: one graph
    even_options = dataclasses.replace(options, batch_size=even or options.batch_size)
    lane = make_lane(even_options, names, dataset, scaled)
    ops = dict(traced_ops(lane.step.graph))
    model = lane.run.masters.model
    batch = next(iter(dataset.train.train_batches(options.batch_size, seed=options.seed)))
    found = [*faults.find(lane.run.rehearse(batch), batch, thorough=True), *lane.run.doubts]
    drawing = [line for line in found if faults.of_draws(line)]
    drawing += faults.random_ops_of(Op(name, op.type, "", "") for name, op in ops.items())
    if found and found[0].startswith("mixed"):
        return found[0]
    if drawing:
        return drawing[0]
    if unlike := unlike_towers(ops):
        return (
            differs_from_itself(options, names[:1], dataset, make_lane, scaled, unlike)
            or f"tower-dependent branch: {unlike}; a model may not know its tower"
        )
    return (
        next(iter(found), None)
        or local_batch_norm(model, options)
        or narrow_layers(model)
        or "unknown: no random op, no local BatchNorm, no difference between the towers' graphs"
    )


def differs_from_itself(
    options: Options, names: Sequence[str], dataset: Data, make_lane: Callable, scaled: bool,
    unlike: str,
) -> str | None:  # fmt: skip
    """Tell whether one device computes something else if Python or NumPy draw something else."""
    batch = next(iter(dataset.train.train_batches(options.batch_size, seed=options.seed)))
    losses = []
    for seed in (1, 2):
        lane = make_lane(options, names, dataset, scaled, python_seed=seed)
        losses.append(lane.make_step(batch)["loss"])
    if losses[0] == losses[1]:
        return None
    return (
        f"state in Python: {unlike}, and a step that is built twice on one "
        "device differs from itself; draw from a keras.random.SeedGenerator"
    )


def local_batch_norm(model: keras.Model, options: Options) -> str | None:
    """Name a BatchNorm layer whose moments are those of a slice."""
    found = [
        layer.path
        for layer in tf_private.layers_of(model)
        if isinstance(layer, keras.layers.BatchNormalization) and not layer.synchronized
    ]
    if found and options.batch_norm == "local":
        return (
            f"local BatchNorm: {found[0]} takes its moments over a tower's slice; type "
            "--batch_norm=sync"
        )
    return None


def unlike_towers(ops: dict[str, tf.Operation]) -> str | None:
    """Name the first layer whose ops or constants are not the same in every tower."""
    towers: dict[int, list[tuple]] = {}
    for name, op in ops.items():
        placed = Op(name, op.type, "", "")
        # Gradients share some constants; a placeholder is a master; draws have places.
        placeful = draws.SCOPE in name or exchange.SCOPE in name
        known = name.startswith("gradient_tape") or op.type == "Placeholder" or placeful
        if placed.tower is not None and not known:
            towers.setdefault(placed.tower, []).append(_signature(placed, op))
    first = towers.pop(0, [])
    for tower, found in sorted(towers.items()):
        more, fewer = Counter(found) - Counter(first), Counter(first) - Counter(found)
        for layer, kind, _ in [s for s in found if s in more] + [s for s in first if s in fewer]:
            return f"layer {layer} is not the same in towers 0 and {tower} (its {kind})"
    return None


def _signature(placed: Op, op: tf.Operation) -> tuple[str, str, bytes]:
    """Return layer, type and, of a constant, value."""
    value = op.get_attr("value").SerializeToString() if op.type == "Const" else b""
    return placed.layer, op.type, value


def narrow_layers(model: keras.Model) -> str | None:
    """Name a layer that computes in less than float64 whatever the run says."""
    for layer in tf_private.layers_of(model):
        if layer.compute_dtype in ("float16", "bfloat16", "float32"):
            return (
                f"rounding: layer {layer.path} computes in {layer.compute_dtype} although the "
                "comparison is in float64; leave out its dtype"
            )
    return None
