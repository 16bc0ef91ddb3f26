"""`towers.verify`: a compiled Keras model on one device against towers, on the user's own data.

`fit` makes the same steps on copies of the model, one on one device and one with each number of
towers, in float64. A model that cannot be copied is compared as it is, in its own precision, and
is left as it was.
"""

import contextlib
import functools
import itertools
import warnings
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import keras
import tensorflow as tf

from towers import devices as tower_devices
from towers import tf_internals
from towers.commands.verify.report import verify_runners
from towers.commands.verify.runner import (
    FitRunner,
    batched,
    copy_of,
    in_float64,
    inputs_of,
    is_built,
    numbers_to_compare,
    rows_in,
    twin_of,
)
from towers.errors import InputError, kind_of
from towers.training.run.precision import force_float64
from towers.training.run.process_state import preserve_rng
from towers.training.step.step import floatx_set
from towers.training.step.train_state import optimizers_of, overrides, restore_after


@preserve_rng()
def verify(
    model: keras.Model,
    x: Any,
    y: Any = None,
    *,
    sample_weight: Any = None,
    batch_size: int | None = None,
    num_towers: int | Sequence[int] = (1, 2, 3, 4),
    steps: int = 3,
    devices: str | Sequence[str] = "",
    dtype: str | None = "float64",
    tolerance: float | None = None,
    say: Callable[[str], None] = print,
    **how: Any,
) -> dict[str, Any]:
    """Compare `fit` of a compiled model on towers with one device; the model stays as it is.

    After each step the loss, the metrics and all variables of model and optimizer are compared.
    After the last step, which has fewer examples than the others, so are an evaluation and
    predictions.

        assert towers.verify(model, x, y, batch_size=32, num_towers=2)["passed"]

    Args:
        model: any compiled Keras model; it may be parallelized.
        x: what `fit` takes, data sets and generators too; the first `steps` batches are used.
        y: the labels, as `fit` takes them.
        sample_weight: as `fit` takes it.
        batch_size: of all towers together; None for Keras' 32.
        num_towers: the numbers of towers that are compared with one device, or one such number; the
            default as far as there are GPUs for them.
        steps: number of steps.
        devices: of the largest number of towers, as `parallelize` takes them.
        dtype: "float64", in which rounding cannot hide a fault, or None for the model's own.
        tolerance: the largest relative difference that passes; None: 1e-9 in float64, 1e-4 in
            float32, 0.05 in less.
        say: prints a line of the report.
        **how: the other arguments of `parallelize`, such as `batch_norm="local"`.

    Returns:
        What `towers verify --json` prints: "passed", "first_difference" (None, or with its "name",
        "step", "num_towers" and likely "cause"), "max_relative_difference" {"2": 1e-15},
        "differences" {name: {"2": 1e-15}}; and "dtype", that of the comparison.

    Raises:
        InputError: the model is not compiled, or an argument is out of range.
    """
    if not isinstance(model, keras.Model):
        raise InputError(f"verify takes a keras.Model, not {kind_of(model)}")
    if not model.compiled:
        raise InputError(
            f"{model.name} is not compiled; call compile first, such as "
            'model.compile(optimizer="sgd", loss="mse")'
        )
    if model.run_eagerly:
        raise InputError(
            f"{model.name} has run_eagerly=True, so every step runs on one device and there is "
            "nothing to compare; compile it without"
        )
    if dtype not in ("float64", None):
        raise InputError(f"dtype={dtype!r} must be 'float64', or None for the model's dtype")
    if steps < 1:
        raise InputError(f"steps={steps} must be at least 1")
    several = num_towers if isinstance(num_towers, Iterable) else [num_towers]
    numbers = numbers_to_compare(",".join(map(str, several)), devices)
    names = tower_devices.tower_devices(max(numbers), devices)
    batches = list(tf_internals.batches_of(x, y, sample_weight, batch_size).take(steps))
    if not batches:
        raise InputError("x has no batch to verify with; give at least one")
    needs_y = model.loss is not None and not overrides(model, "train_step", "compute_loss")
    if needs_y and keras.utils.unpack_x_y_sample_weight(batches[0])[1] is None:
        raise InputError(f"the loss of {model.name} needs y: call towers.verify(model, x, y)")
    with warnings.catch_warnings(record=True) as warned, contextlib.ExitStack() as stack:
        warnings.simplefilter("always")
        stack.enter_context(tf_internals.convolve_without_xla())
        reference = None
        if dtype:
            batch, failure = _wide(batches[0]), f"{model.name} cannot be copied and trained"
            make_model = functools.partial(copy_of, model, inputs_of(batch))
            with contextlib.ExitStack() as wide:
                wide.enter_context(force_float64())
                wide.enter_context(floatx_set("float64"))
                wide.enter_context(not_fused())
                reference = in_float64(lambda: FitRunner(make_model()), batch, failure, say)
                if reference:
                    stack.push(wide.pop_all())
        if reference is None:
            _build(model, batches[0])
            make_model = functools.partial(twin_of, model)
            reference = FitRunner(make_model())
            stack.enter_context(
                restore_after([*reference.named.values(), *model.metrics_variables])
            )
        say(
            f"verify      {model.name}: {steps} steps of fit in {reference.dtype}, one device "
            f"against {','.join(map(str, numbers))} towers"
        )
        runners = [FitRunner(make_model(), names[:number], how, reference) for number in numbers]
        for runner in runners:
            runner.set_variables(reference.variables())
        if reference.dtype == "float64":
            batches = list(map(_wide, batches))
        batches = list(itertools.islice(itertools.cycle(batches), steps))
        if steps > 1 and rows_in(batches[-1]) == rows_in(batches[0]) > 1:
            batches[-1] = next(iter(batched(batches[-1], rows_in(batches[-1]) - 1)))
        result = verify_runners(reference, runners, batches, batches[-1], say, tolerance)
    for line in dict.fromkeys(str(warning.message) for warning in warned):
        say(f"warning     {line}")
    return result


def _build(model: keras.Model, batch: Any) -> None:
    """Build a model and its optimizer, as the first step would."""
    with contextlib.suppress(NotImplementedError):  # without `call`, steps build a model
        if not is_built(model):
            model(inputs_of(batch))
    if is_built(model) and model.optimizer is not None and not model.optimizer.built:
        model.optimizer.build(model.trainable_variables)
    if not all(part.built for part in [model, *optimizers_of(model)]):
        raise InputError(
            f"{model.name} cannot be copied, because it or its optimizer is not built; train one "
            "batch first: model.train_on_batch(x, y)"
        )


def not_fused() -> contextlib.AbstractContextManager[None]:
    """Keep TensorFlow from fusing ops in the block.

    Fusions differ between CPUs and GPUs; in float64 there are none, and a warning at each op.
    """
    return tf_internals.graph_optimizer_set(remapping="OFF")


def _wide(batch: Any) -> Any:
    return tf.nest.map_structure(
        lambda x: tf.cast(x, tf.float64) if x.dtype.is_floating else x,
        batch,
        expand_composites=True,
    )
