"""Learning-rate schedules as stateless functions of the epoch, independent of batch and towers.

A resumed run has no schedule's state to restore.
"""

import math

import tensorflow as tf

from towers.options.parts import UpdateOptions


def learning_rate(options: UpdateOptions, total_epochs: float, epoch: tf.Tensor) -> tf.Tensor:
    """Return the learning rate after a number of epochs, a float64 scalar.

    It rises from zero to `options.learning_rate` during `warmup_epochs`; `schedule` covers the
    epochs left: "constant"; "step", multiplied by `decay_factor` at each of `decay_epochs`;
    "linear", to zero at the end; "cosine", likewise (Loshchilov and Hutter 2017, without restarts);
    "onecycle", a rise from peak / 25, by default over a quarter of the run, and a cosine fall to
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
