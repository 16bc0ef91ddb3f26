"""The optimizer that the flags name, and its schedule."""

import functools
import math
from collections.abc import Sequence

import keras
import tensorflow as tf

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
    """Return the Keras optimizer that the options name, see `UpdateOptions`.

    Its rate is set every step.
    """
    clips = {name: limit for flag, name in CLIPS.items() if (limit := getattr(options, flag))}
    optimizer = OPTIMIZERS[options.optimizer](options)(options.learning_rate, **clips)
    if options.optimizer == "muon":
        optimizer.outputs = {weight.path for weight in list(filter(is_decayed, weights))[-1:]}
    if options.optimizer in DECAY_APART:
        optimizer.exclude_from_weight_decay(var_list=[v for v in weights if not is_decayed(v)])
    return optimizer


def check_own(options: UpdateOptions) -> None:
    """Raise InputError for flags that a user's own optimizer sets itself."""
    names = ("learning_rate", "schedule", "warmup_epochs", "decay_epochs", "momentum")
    for name in names if options.makes_own_optimizer else ():
        if getattr(options, name) != getattr(UpdateOptions, name):
            raise InputError(
                f"--{name}={getattr(options, name)}, but the optimizer of "
                f"--optimizer={options.optimizer} has its own; set it there, and leave --{name} out"
            )


def learning_rate(options: UpdateOptions, total_epochs: float, epoch: tf.Tensor) -> tf.Tensor:
    """Return the learning rate after a number of epochs, a float64 scalar.

    It rises from zero to `options.learning_rate` during `warmup_epochs`. `schedule` covers the
    other epochs. "constant". "step": multiplied by `decay_factor` at each of `decay_epochs`.
    "linear": to zero at the end. "cosine": likewise (Loshchilov and Hutter 2017, without restarts).
    "onecycle": a rise from peak / 25, by default over a quarter of the run, and a cosine fall to
    peak / 10^4 (Smith and Topin 2018).

    Args:
        options: of the run.
        total_epochs: length of the run.
        epoch: epochs seen so far, float64.
    """
    kind, peak = options.schedule, options.learning_rate
    rise, first, last = options.warmup_epochs, 0.0, 0.0
    if kind == "onecycle":
        rise, first, last = rise or total_epochs / 4, peak / 25, peak / 1e4
    done = tf.clip_by_value((epoch - rise) / max(total_epochs - rise, 1e-9), 0.0, 1.0)
    if kind == "constant":
        rate = tf.constant(peak, tf.float64)
    elif kind == "step":
        boundaries = tf.constant(options.decay_boundaries(), tf.float64)
        passed = tf.reduce_sum(tf.cast(epoch >= boundaries, tf.float64))
        rate = peak * tf.constant(options.decay_factor, tf.float64) ** passed
    elif kind == "linear":
        rate = peak * (1.0 - done)
    else:
        rate = last + (peak - last) * 0.5 * (1.0 + tf.cos(math.pi * done))
    return tf.where(epoch < rise, first + (peak - first) * epoch / rise, rate) if rise else rate
