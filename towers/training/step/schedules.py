"""Learning-rate schedules as stateless functions of the epoch, independent of batch and towers.

    rate = schedule("cosine", peak=0.1, total_epochs=90, warmup_epochs=5)
    rate(tf.constant(47.5, tf.float64))  # 0.05

A resumed run has no schedule's state to restore.
"""

import math
from collections.abc import Callable, Sequence

import tensorflow as tf


def schedule(
    kind: str,
    *,
    peak: float,
    total_epochs: float,
    warmup_epochs: float = 0.0,
    decay_epochs: Sequence[float] = (),
    decay_factor: float = 0.1,
) -> Callable[[tf.Tensor], tf.Tensor]:
    """Return the learning rate as a function of the epochs seen so far.

    Args:
        kind: "constant"; "step", multiplied by `decay_factor` at each of `decay_epochs`; "linear",
            to zero at the end; "cosine", likewise (Loshchilov and Hutter 2017, without restarts);
            "onecycle", a linear rise from peak / 25 and a cosine fall to peak / 10^4 (Smith and
            Topin 2018).
        peak: the highest rate.
        total_epochs: length of the run.
        warmup_epochs: linear rise from zero before the schedule, which covers the epochs left. For
            "onecycle" the length of its rise; 0 is a quarter of the run.
        decay_epochs: of "step", ascending.
        decay_factor: of "step".
    """
    rise, first, last = warmup_epochs, 0.0, 0.0
    if kind == "onecycle":
        rise, first, last = warmup_epochs or total_epochs / 4, peak / 25, peak / 1e4
    fall = max(total_epochs - rise, 1e-9)

    def after_rise(epoch: tf.Tensor) -> tf.Tensor:
        if kind == "step":
            boundaries = tf.constant(list(decay_epochs), tf.float64)
            passed = tf.reduce_sum(tf.cast(epoch >= boundaries, tf.float64))
            return peak * tf.constant(decay_factor, tf.float64) ** passed
        if kind == "constant":
            return tf.constant(peak, tf.float64)
        done = tf.clip_by_value((epoch - rise) / fall, 0.0, 1.0)
        if kind == "linear":
            return peak * (1.0 - done)
        return last + (peak - last) * 0.5 * (1.0 + tf.cos(math.pi * done))

    def rate(epoch: tf.Tensor) -> tf.Tensor:
        if not rise:
            return after_rise(epoch)
        rising = first + (peak - first) * epoch / rise
        return tf.where(epoch < rise, rising, after_rise(epoch))

    return rate
