"""The optimizer that the flags name."""

import functools
from collections.abc import Sequence
from typing import Any

import keras

from towers.errors import InputError
from towers.options.parts import UpdateOptions
from towers.training.run.muon import Muon

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


def is_decayed(weight: keras.Variable) -> bool:
    """Return whether weight decay applies: to kernels, not to biases and scales."""
    return len(weight.shape) > 1


def make_optimizer(
    weights: Sequence[keras.Variable], options: UpdateOptions
) -> keras.optimizers.Optimizer:
    """Return the Keras optimizer that `options.optimizer` names; its rate is set every step.

    Args:
        weights: the trainable variables that it will update.
        options: of the run.
    """
    clips = {name: limit for flag, name in CLIPS.items() if (limit := getattr(options, flag))}
    optimizer = OPTIMIZERS[options.optimizer](options)(options.learning_rate, **clips)
    if options.optimizer == "muon":
        optimizer.outputs = {weight.path for weight in list(filter(is_decayed, weights))[-1:]}
    if options.optimizer in DECAY_APART:
        optimizer.exclude_from_weight_decay(var_list=[v for v in weights if not is_decayed(v)])
    return optimizer


def checked(made: Any, options: UpdateOptions) -> keras.optimizers.Optimizer:
    """Return what a user's function has made; raise InputError if that is no optimizer."""
    if isinstance(made, _K.Optimizer):
        return made
    raise InputError(
        f"--optimizer={options.optimizer} returned {type(made).__name__}; a "
        "keras.optimizers.Optimizer is needed"
    )


def check_own(options: UpdateOptions) -> None:
    """Raise InputError for flags that a user's own optimizer sets itself."""
    names = ("learning_rate", "schedule", "warmup_epochs", "decay_epochs", "momentum")
    for name in names if options.makes_own_optimizer else ():
        if getattr(options, name) != getattr(UpdateOptions, name):
            raise InputError(
                f"--{name}={getattr(options, name)}, but the optimizer of "
                f"--optimizer={options.optimizer} has its own: set it there, and leave --{name} out"
            )
