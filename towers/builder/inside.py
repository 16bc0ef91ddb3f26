"""What stands in the place of Keras' ops of integers on GPUs."""

import contextlib
import functools
from collections.abc import Callable
from typing import Any

import tensorflow as tf

from towers import tf_private
from towers.builder import kinds


def integers_on(device: str) -> contextlib.AbstractContextManager:
    """Let Keras' ops take int64 where a GPU is given int32, which it has the host work on."""
    if not kinds.is_gpu(device):
        return contextlib.nullcontext()
    return tf_private.ops_of_integers_replaced(lambda name: functools.partial(_by_int64, name))


def _by_int64(name: str, own: Callable) -> Callable:
    def wide(value: Any) -> Any:
        if not tf.is_tensor(value) or value.shape.rank == 0:  # single ones are of shapes: the host
            return value
        if name == "signbit" and value.dtype.is_floating:  # which Keras takes of an int32, too
            value = tf.bitcast(tf.cast(value, tf.float32), tf.int32)
        return tf.cast(value, tf.int64) if value.dtype == tf.int32 else value

    def call(*args: Any, **kwargs: Any) -> Any:
        return own(*map(wide, args), **kwargs)

    return call
