"""BatchNorm over the global batch: moments of all towers' slices together.

Keras' `BatchNormalization` layers need not know: while a tower is built, their moments are put
together over the towers, forward and backward.
"""

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any
from unittest import mock

import keras
import tensorflow as tf

MODES = ("sync", "local")


@contextlib.contextmanager
def over_all_towers(all_gather: Callable | None, mode: str) -> Iterator[None]:
    """Let BatchNorm layers that are called in the block take their moments over all towers.

    Args:
        all_gather: stacks what each tower has, [N, ...], and can be differentiated; None if there
            is one tower.
        mode: "sync", or "local" for those layers only that ask for it by `synchronized=True`.
    """
    if all_gather is None:
        yield
        return
    local_moments = keras.layers.BatchNormalization._moments

    def moments(layer: Any, inputs: tf.Tensor, mask: tf.Tensor | None) -> tuple:
        if mode == "sync" or layer.synchronized:
            return _moments(layer._reduction_axes, inputs, mask, all_gather)
        return local_moments(layer, inputs, mask)

    with mock.patch.object(keras.layers.BatchNormalization, "_moments", moments):
        yield


def _moments(
    axes: Sequence[int],
    inputs: tf.Tensor,
    mask: tf.Tensor | None,
    all_gather: Callable[[tf.Tensor], tf.Tensor],
) -> tuple[tf.Tensor, tf.Tensor]:
    """Return mean and variance [C] over the batch and all `axes`, which are all but one.

    Each tower's number, mean and sum of squared differences from that mean are put together as in
    Chan et al. 1979: one exchange, and large means do not cancel.
    """
    (channels,) = set(range(inputs.shape.rank)) - set(axes)
    size = inputs.shape[channels]
    used, number, epsilon = None, tf.size(inputs, tf.int64) // size, 0.0
    if mask is not None:
        used = tf.broadcast_to(tf.cast(tf.expand_dims(mask, -1), tf.bool), tf.shape(inputs))
        number, epsilon = tf.math.count_nonzero(used) // size, keras.config.epsilon()  # as in Keras

    def total(values: tf.Tensor) -> tf.Tensor:
        values = values if used is None else tf.where(used, values, tf.zeros_like(values))
        return tf.reduce_sum(values, axes, keepdims=True)

    number = tf.cast(number, inputs.dtype)
    mean = tf.math.divide_no_nan(total(inputs), number)
    squares = total(tf.math.squared_difference(inputs, mean))
    own = tf.concat([tf.reshape(mean, [size]), tf.reshape(squares, [size]), [number]], axis=0)
    means, squares, numbers = tf.split(all_gather(own), [size, size, 1], axis=1)
    everything = tf.reduce_sum(numbers) + epsilon
    mean = tf.reduce_sum(numbers * means, axis=0) / everything
    squares += numbers * tf.math.squared_difference(means, mean)
    return mean, tf.reduce_sum(squares, axis=0) / everything
