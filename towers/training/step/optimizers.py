"""The optimizer that the flags name, and its description in the run's summary."""

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

import keras

from towers.errors import InputError
from towers.options.functions import call_without_arguments
from towers.options.parts import StepOptions, UpdateOptions
from towers.training.step.muon import Muon
from towers.training.step.optimizer_step import is_decayed

MOST_SKIPPED = 10  # steps in a row that are not finite, with --on_nan=skip

_K = keras.optimizers
# {name: function from options to a constructor, which takes the learning rate}
OPTIMIZERS = {
    "sgd": lambda o: _K.SGD,
    "momentum": lambda o: functools.partial(_K.SGD, momentum=o.momentum),
    "nesterov": lambda o: functools.partial(_K.SGD, momentum=o.momentum, nesterov=True),
    "adam": lambda o: _K.Adam,
    "adamw": lambda o: functools.partial(_K.AdamW, weight_decay=o.weight_decay),
    "adamax": lambda o: _K.Adamax,
    "nadam": lambda o: _K.Nadam,
    "lion": lambda o: functools.partial(_K.Lion, weight_decay=o.weight_decay),
    "lamb": lambda o: functools.partial(_K.Lamb, weight_decay=o.weight_decay),
    "rmsprop": lambda o: _K.RMSprop,
    "adagrad": lambda o: _K.Adagrad,
    "adadelta": lambda o: _K.Adadelta,
    "muon": lambda o: functools.partial(Muon, momentum=o.momentum, weight_decay=o.weight_decay),
}
CLIPS = {"clip_norm": "clipnorm", "clip_value": "clipvalue", "clip_global_norm": "global_clipnorm"}
DECAY_APART = ("adamw", "lion", "lamb", "muon")  # with decoupled weight decay


def make_optimizer(
    weights: Sequence[keras.Variable], options: UpdateOptions, **clips: float
) -> keras.optimizers.Optimizer:
    """Return the Keras optimizer that `options.optimizer` names.

    Args:
        weights: the trainable variables that it will update.
        options: of the run. The learning rate of an optimizer in `OPTIMIZERS` is set every step;
            that of a user's function is its own.
        **clips: Keras' clipping arguments, for an optimizer that clips by itself.

    Raises:
        InputError: the user's function returns no optimizer.
    """
    if is_own(options):
        optimizer = call_without_arguments("optimizer", options.optimizer)
        if not isinstance(optimizer, _K.Optimizer):
            raise InputError(
                f"--optimizer={options.optimizer} returned {type(optimizer).__name__}; a "
                "keras.optimizers.Optimizer is needed"
            )
        return optimizer
    optimizer = OPTIMIZERS[options.optimizer](options)(options.learning_rate, **clips)
    if options.optimizer == "muon":
        optimizer.outputs = {weight.path for weight in list(filter(is_decayed, weights))[-1:]}
    if options.optimizer in DECAY_APART:
        optimizer.exclude_from_weight_decay(var_list=[v for v in weights if not is_decayed(v)])
    return optimizer


def rules_of(options: StepOptions) -> StepOptions:
    """Return the options without a weight decay that the optimizer makes itself."""
    is_apart = options.optimizer in DECAY_APART
    return dataclasses.replace(options, weight_decay=0.0) if is_apart else options


def is_own(options: UpdateOptions) -> bool:
    """Return whether a user's function makes the optimizer."""
    return ":" in options.optimizer


def check_own(options: UpdateOptions) -> None:
    """Raise InputError for flags that a user's own optimizer sets itself."""
    names = ("learning_rate", "schedule", "warmup_epochs", "decay_epochs", "momentum")
    for name in names if is_own(options) else ():
        if getattr(options, name) != getattr(UpdateOptions, name):
            raise InputError(
                f"--{name}={getattr(options, name)}, but the optimizer of "
                f"--optimizer={options.optimizer} has its own: set it there, and leave --{name} out"
            )


def clips_of(options: UpdateOptions) -> dict[str, float]:
    """Return the clipping flags as arguments of a Keras optimizer."""
    return {name: limit for flag, name in CLIPS.items() if (limit := getattr(options, flag))}


def describe_flags(options: UpdateOptions, loss_scale: Any) -> dict[str, str]:
    """Return `Task.describe_update` of an update by flags.

    Args:
        options: of the run.
        loss_scale: its variable, None without one.
    """
    apart = options.optimizer in DECAY_APART
    decay = f"{options.optimizer}, apart from the gradient" if apart else "L2"
    rate = f"learning rate {options.learning_rate:g} {options.schedule}"
    if is_own(options):
        rate = "with the learning rate of its own"
    return {
        "decay": f"weight decay {options.weight_decay:g} ({decay})",
        "scale": describe_scale(loss_scale),
        "clips": ", ".join(f"{n}={limit}" for n in CLIPS if (limit := getattr(options, n))),
        "clock": f"examples; {options.optimizer}, {rate}",
    }


def describe_scale(loss_scale: Any) -> str:
    """Return the summary's text on the loss scale, "" without one."""
    if loss_scale is None:
        return ""
    return f"; loss scale from {float(loss_scale.numpy()):g}"
