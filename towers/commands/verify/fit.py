"""`towers.verify`: a compiled Keras model on one device against towers, on the user's own data.

    result = towers.verify(model, x, y, batch_size=64)
    assert result["passed"], result["first_difference"]

`fit` makes the same steps on copies of the model, one on one device and one with each number of
towers, in float64. A model that cannot be copied is compared as it is, in its own precision, and
is left as it was.
"""

import contextlib
import functools
import inspect
import itertools
import random
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from towers import devices as tower_devices
from towers import tf_private
from towers.builder import faults
from towers.builder.splitting import num_rows
from towers.commands.verify.causes import causes_in, outside_of_towers
from towers.commands.verify.command import outcome, side_by_side
from towers.commands.verify.differences import NUDGE_PART, Difference, tolerance_of
from towers.commands.verify.fit_lane import FitLane, copy_of, is_built, kept
from towers.errors import InputError
from towers.graphs.placement import traced_ops
from towers.options.fields import parse_tower_numbers
from towers.text import first_line
from towers.training.guest import without_advice
from towers.training.masters import optimizers_of


def verify(
    model: keras.Model,
    x: Any,
    y: Any = None,
    *,
    sample_weight: Any = None,
    batch_size: int | None = None,
    num_towers: Sequence[int] = (1, 2, 3, 4),
    steps: int = 3,
    devices: str | Sequence[str] = "",
    dtype: str | None = "float64",
    tolerance: float | None = None,
    say: Callable[[str], None] = print,
    **how: Any,
) -> dict[str, Any]:
    """Compare `fit` of a compiled model on towers with one device; the model stays as it is.

    After each step the loss, the metrics and all variables of model and optimizer are compared;
    after the last, which has fewer examples than the others, an evaluation and predictions, too.

        assert towers.verify(model, x, y, batch_size=32, num_towers=(1, 2))["passed"]

    Args:
        model: any compiled Keras model; it may be parallelized.
        x: what `fit` takes, data sets and generators too; the first `steps` batches are used.
        y: the labels, as `fit` takes them.
        sample_weight: as `fit` takes it.
        batch_size: of all towers together; None for Keras' 32.
        num_towers: the numbers of towers that are compared with one device.
        steps: that are made.
        devices: one for each of the most towers, as `parallelize` takes them.
        dtype: "float64", in which rounding cannot hide a fault, or None for the model's own.
        tolerance: the largest relative difference that passes; None: 1e-9 in float64, 1e-4 in
            float32, 0.05 in less.
        say: is given each line of the report.
        **how: the other arguments of `parallelize`, as `batch_norm="local"`.

    Returns:
        What `towers verify --json` prints: "passed", "first_difference" (None, or with its "name",
        "step", "num_towers" and likely "cause"), "max_relative_difference" {"2": 1e-15},
        "differences" {name: {"2": 1e-15}}; and "dtype", that of the comparison.

    Raises:
        InputError: the model is not compiled, or an argument is not as said here.
    """
    _check(model, steps, dtype)
    devices_of = _devices_of(num_towers, devices)
    batches = list(tf_private.batches_of(x, y, sample_weight, batch_size).take(steps))
    if not batches:
        raise InputError("x has no batch to verify with: one or more are needed")
    with warnings.catch_warnings(record=True) as doubts, contextlib.ExitStack() as stack:
        warnings.simplefilter("always")
        stack.enter_context(without_advice())
        reference, make_lane = _lanes(model, batches[0], bool(dtype), how, stack, say)
        result = _verified(reference, make_lane, devices_of, batches, steps, tolerance, doubts, say)
    for line in dict.fromkeys(str(doubt.message) for doubt in doubts):
        say(f"warning     {line}")
    return result


def _devices_of(
    num_towers: Sequence[int], devices: str | Sequence[str]
) -> dict[int, Sequence[str]]:
    """Return the devices of each number of towers."""
    numbers = parse_tower_numbers(",".join(map(str, num_towers)))
    names = tower_devices.tower_devices(max(numbers), devices)
    return {number: names[:number] for number in numbers}


def _verified(
    reference: FitLane,
    make_lane: Callable[..., FitLane],
    devices_of: Mapping[int, Sequence[str]],
    batches: Sequence[Any],
    steps: int,
    tolerance: float | None,
    doubts: Sequence[warnings.WarningMessage],
    say: Callable[[str], None],
) -> dict[str, Any]:
    """Compare the reference with a lane for each number of towers; return the JSON."""
    dtype, numbers = _least_dtype(reference.model), list(devices_of)
    say(
        f"verify      {reference.model.name}: {steps} steps of fit in {dtype}, one device against "
        f"{','.join(map(str, numbers))} towers"
    )
    tolerance = tolerance or tolerance_of(dtype)
    lanes = [make_lane(devices) for devices in devices_of.values()]
    found = _compare(reference, lanes, batches, steps, tolerance, say)
    causes = functools.partial(_likely_causes, lanes, batches[0], doubts, make_lane)
    return outcome(found, numbers, causes, say, tolerance) | {"dtype": dtype}


def _check(model: keras.Model, steps: int, dtype: str | None) -> None:
    if not isinstance(model, keras.Model):
        raise InputError(f"verify takes a keras.Model, not {type(model).__name__}")
    if not model.compiled:
        raise InputError(
            f"{model.name} is not compiled, and verify trains it: type "
            'model.compile(optimizer="sgd", loss="mse")'
        )
    if model.run_eagerly:
        raise InputError(
            f"{model.name} has run_eagerly=True, with which every step runs on one device: there "
            "is nothing to compare; compile it without"
        )
    if dtype not in ("float64", None):
        raise InputError(f"dtype={dtype!r} must be 'float64', or None for the model's own")
    if steps < 1:
        raise InputError(f"steps={steps}: 1 or more are needed")


def _lanes(
    model: keras.Model,
    batch: Any,
    wide: bool,
    how: Mapping[str, Any],
    stack: contextlib.ExitStack,
    say: Callable[[str], None],
) -> tuple[FitLane, Callable[..., FitLane]]:
    """Return the lane of one device, and what makes one for devices of towers.

    They have copies of the model in float64; or, if that is not wanted or cannot be, the model
    itself, which the stack restores.
    """
    reference = _in_float64(model, batch, stack, say) if wide else None
    make_model = functools.partial(copy_of, model, _inputs(_wide(batch)))
    if reference is None:
        _build(model, batch)
        stack.enter_context(kept(model))
        reference, make_model = FitLane(model), lambda: model

    def make_lane(devices: Sequence[str] = ()) -> FitLane:
        lane = FitLane(make_model(), devices, how, reference.names)
        lane.take(reference.variables())
        return lane

    return reference, make_lane


def _in_float64(
    model: keras.Model, batch: Any, stack: contextlib.ExitStack, say: Callable[[str], None]
) -> FitLane | None:
    """Return a lane of a copy that has made a step in float64, which the stack goes on with."""
    with contextlib.ExitStack() as own:
        own.enter_context(tf_private.all_in_float64())
        own.enter_context(tf_private.floatx_set("float64"))
        batch = _wide(batch)
        try:
            lane = FitLane(copy_of(model, _inputs(batch)))
            before = lane.variables()
            lane.make_step(_dataset(batch))
            lane.take(before)
        except Exception as error:
            say(f"in float64  {model.name} cannot be copied and trained: {first_line(error)}")
            return None
        stack.push(own.pop_all())
    return lane


def _build(model: keras.Model, batch: Any) -> None:
    """Build a model and its optimizer, as the first step would."""
    with contextlib.suppress(NotImplementedError):  # one without `call` is built by its steps
        if not is_built(model):
            model(_inputs(batch))
    if is_built(model) and model.optimizer is not None and not model.optimizer.built:
        model.optimizer.build(model.trainable_variables)
    if not all(part.built for part in [model, *optimizers_of(model)]):
        raise InputError(
            f"{model.name} is not built, or an optimizer of it, and no copy can be made: train "
            "one batch before, with model.train_on_batch(x, y)"
        )


def _compare(
    reference: FitLane,
    lanes: Sequence[FitLane],
    batches: Sequence[Any],
    num_steps: int,
    tolerance: float,
    say: Callable[[str], None],
) -> list[Difference]:
    """Make the steps on all lanes; return the differences."""
    if reference.precision == "float64":
        batches = [_wide(batch) for batch in batches]
    parts = [part for part in ("evaluate", "predict") if _can(part, reference, batches[0], say)]

    def steps() -> Iterator[tuple]:
        for step, batch in enumerate(itertools.islice(itertools.cycle(batches), num_steps)):
            last = step == num_steps - 1
            of_all = num_steps > 1 and _num_rows(batch) == _num_rows(batches[0])
            yield _dataset(batch, fewer=int(last and of_all)), parts if last else ()
            if step == 0:
                say(f"step 0      done on {len(lanes) + 1} runs, {num_steps - 1} to come")

    nudge = tolerance * NUDGE_PART
    return list(side_by_side(reference, lanes, steps(), results_of, tolerance, nudge))


def results_of(
    lane: FitLane, batch: tf.data.Dataset, parts: Sequence[str]
) -> dict[str, np.ndarray]:
    """Make a step, then what else is named on the same batch; return all that comes of it."""
    found = lane.make_step(batch)
    for part in parts:
        found |= getattr(lane, part)(batch)
    return found


def _can(part: str, reference: FitLane, batch: Any, say: Callable[[str], None]) -> bool:
    """Tell whether one device can: a model with its own `train_step` may have no `call`."""
    before = reference.variables()
    try:
        getattr(reference, part)(_dataset(batch))
    except Exception as error:
        say(f"{part:11} left out, it fails on one device: {first_line(error)}")
        return False
    reference.take(before)
    return True


def _likely_causes(
    lanes: Sequence[FitLane],
    batch: Any,
    doubts: Sequence[warnings.WarningMessage],
    make_lane: Callable[[], FitLane],
    first: Difference,
) -> Iterator[str]:
    """Yield in one line each what most likely makes the first difference."""
    if cause := outside_of_towers(first):
        yield cause
        return
    lane = next(lane for lane in lanes if lane.num_towers == first.num_towers)
    batch = _wide(batch) if lane.precision == "float64" else batch
    builder, leaves = lane.builder, tf.nest.flatten(_inputs(batch))
    found = []
    with contextlib.suppress(Exception):  # of a model whose own train_step calls something else
        rehearsal = builder.rehearse(_rows_of(lane.model, _inputs(batch)), *leaves, num_slices=2)
        found = faults.find(rehearsal, leaves, thorough=True)
    told = [doubt for doubt in doubts if Path(doubt.filename).parent.name == "builder"]
    found += [str(doubt.message) for doubt in told]
    rows = _num_rows(batch)
    number = builder.num_slices
    fewer = rows % number if rows > number else 0  # slices of one size: one graph
    ops = dict(traced_ops(lane.graph(_dataset(batch, fewer))))

    def differs_from_itself() -> bool:
        losses = []
        for seed in (1, 2):
            random.seed(seed)
            np.random.seed(seed)
            losses.append(make_lane().make_step(_dataset(batch))["loss"])
        return losses[0] != losses[1]

    local = builder.batch_norm == "local" and 'give batch_norm="sync"'
    local = local or (builder.accumulate_steps > 1 and "give accumulate_steps=1")
    yield from causes_in(first, lane.model, found, ops, differs_from_itself, local)


def _rows_of(model: keras.Model, inputs: Any) -> Callable:
    """Return a function of the leaves of a model's inputs to a number for each example."""
    training = {"training": True} if "training" in inspect.signature(model.call).parameters else {}

    def fn(*leaves: Any) -> tf.Tensor:
        return faults.rows_of(model(tf.nest.pack_sequence_as(inputs, leaves), **training))

    return fn


def _dataset(batch: Any, fewer: int = 0) -> tf.data.Dataset:
    """Return a batch, of which the last examples are left out; one trace does for any number."""
    rows = _num_rows(batch)
    return tf.data.Dataset.from_tensors(batch).unbatch().take(max(rows - fewer, 1)).batch(rows)


def _inputs(batch: Any) -> Any:
    return keras.utils.unpack_x_y_sample_weight(batch)[0]


def _num_rows(batch: Any) -> int:
    return int(num_rows(tf.nest.flatten(batch)[0]))


def _wide(batch: Any) -> Any:
    """Return a batch with its floating tensors in float64."""

    def wide(x: tf.Tensor) -> tf.Tensor:
        return tf.cast(x, tf.float64) if x.dtype.is_floating else x

    return tf.nest.map_structure(wide, batch, expand_composites=True)


def _least_dtype(model: keras.Model) -> str:
    """Return the floating type of the fewest bits that a layer of a model computes in."""
    dtypes = {layer.compute_dtype for layer in tf_private.layers_of(model)}
    floating = [d for d in sorted(dtypes) if d and tf.as_dtype(d).is_floating]
    return min(floating, key=lambda dtype: tf.as_dtype(dtype).size, default="float32")
