"""Compiles a model as --loss, --metrics and the flags of the update say."""

import functools
import inspect
from collections.abc import Callable
from typing import Any

import keras
import tensorflow as tf

from towers.errors import InputError
from towers.options.functions import call_without_arguments, load_function
from towers.options.run import OF_COMPILED, Options
from towers.training.step.optimizer_step import is_decayed
from towers.training.step.optimizers import DECAY_APART, clips_of, make_optimizer


def refuse_overridden(options: Options) -> None:
    """Raise InputError for a flag that would override a setting of a compiled model."""
    for name in OF_COMPILED:
        value, default = getattr(options, name), getattr(Options, name)
        if value != default:
            raise InputError(
                f"--{name}={value}, but {options.model} returns a compiled model, which has its "
                f"own: leave --{name} out, or return the model without compile"
            )


def compile_from_flags(model: keras.Model, options: Options) -> None:
    """Compile a model as --loss, --metrics and the flags of the update say.

    Args:
        model: built. Weight decay is added to the regularisers of its kernels.
        options: of the run.

    Raises:
        InputError: a flag names nothing that can be used, or --label_smoothing is given.
    """
    if options.label_smoothing:
        raise InputError(
            f"--label_smoothing={options.label_smoothing:g} is the classifier's own: with --loss "
            "or --metrics give a loss that smooths, as module:function"
        )
    loss: Any = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    if options.loss:
        loss = _resolve("loss", options.loss, keras.losses.get)
    names = filter(None, options.metrics.split(","))
    metrics = [_resolve("metrics", name, keras.metrics.get) for name in names]
    weights = model.trainable_variables
    if options.weight_decay and options.optimizer not in DECAY_APART:
        for weight in filter(is_decayed, weights):
            own = weight.regularizer
            weight.regularizer = functools.partial(_with_decay, options.weight_decay, own)
    optimizer = make_optimizer(weights, options, **clips_of(options))
    model.compile(optimizer, loss, metrics=metrics)


def _with_decay(decay: float, own: Callable | None, weight: Any) -> tf.Tensor:
    value = tf.convert_to_tensor(weight)
    penalty = tf.cast(decay, value.dtype) * tf.nn.l2_loss(value)
    return penalty if own is None else penalty + own(value)


def _resolve(flag: str, name: str, get: Callable) -> Any:
    """Return Keras' loss or metric of a name, or the user's own module:function.

    A class, or a function without arguments, is called.
    """
    if ":" in name:
        resolved = load_function(flag, name)
        if isinstance(resolved, type) or not inspect.signature(resolved).parameters:
            resolved = call_without_arguments(flag, name)
        if not callable(resolved):
            raise InputError(
                f"--{flag}={name} returned {type(resolved).__name__}; a function of targets and "
                f"outputs, or a Keras {'loss' if flag == 'loss' else 'metric'}, is needed"
            )
        return resolved
    try:
        resolved = get(name)
        return name if flag == "metrics" else resolved  # "accuracy" has many meanings, mae its name
    except ValueError:
        raise InputError(
            f"--{flag}={name}: Keras has nothing of that name; give one, such as "
            f"{'mean_squared_error' if flag == 'loss' else 'mae'}, or module:function"
        ) from None
