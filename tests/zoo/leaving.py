"""What calls leave in attributes, what values decide, and gradients that are no sums."""

import keras
import tensorflow as tf

from tests.zoo.entry import SAME
from tests.zoo.mixing import MIXED, computing
from tests.zoo.parts import layer, on_features, own

layers, ops = keras.layers, keras.ops

# -------------------------------------------------------------------------------------- Attributes


class Skips(layers.Layer):
    """Adds what another layer has left, if it has left something."""

    def __init__(self, other, name):
        super().__init__()
        self.other, self.left = [other], name  # not a layer of this one

    def call(self, x):
        return x + getattr(self.other[0], self.left)


def _left_and_used(leave):
    """Return a layer that leaves `leave(x)` in an attribute, some layers, and one that adds it."""

    def make():
        @layer()
        def leaving(self, x):
            self.kept = leave(x)
            return x

        first = leaving()
        return [first, layers.Dense(6, activation="tanh"), Skips(first, "kept")]

    return make


rows_left = on_features(SAME, "each example finds its own", _left_and_used(lambda x: ops.sin(x)))
mean_left = on_features(
    MIXED, "each finds the mean of all", _left_and_used(lambda x: ops.mean(x, axis=0))
)


# ------------------------------------------------------------------------ What values decide


rare_branch = computing(
    MIXED,
    "one large number changes all examples",
    lambda x: tf.cond(tf.reduce_any(x > 0.95), lambda: x / 2, lambda: x),
)

# ------------------------------------------------------------- Backward passes that are no sum


def _backward(change):
    """Return a function whose gradient `change` makes of the upstream one."""

    @tf.custom_gradient
    def function(x):
        return tf.identity(x), change

    return function


clipped_by_example = computing(
    SAME,
    "each example's gradient is clipped by itself",
    _backward(lambda g: tf.clip_by_norm(g, 1e-3, axes=[1])),
)
clipped_over_all = computing(
    MIXED, "the batch's gradient is clipped", _backward(lambda g: tf.clip_by_norm(g, 1e-3))
)


@own(on_features, "inexact", "a kernel's gradient is clipped in each tower", quick=True,
     kernel=(None, 5))  # fmt: skip
def kernel_clipped(self, x):
    @tf.custom_gradient
    def clipped(kernel):
        return tf.identity(kernel), lambda upstream: tf.clip_by_norm(upstream, 1e-3)

    return tf.matmul(x, clipped(tf.convert_to_tensor(self.kernel.value)))


# ------------------------------------------------------------------- Functions within functions


@own(on_features, SAME, "a program of XLA's within the towers", kernel=(None, 5))
def compiled_inside(self, x):
    kernel = tf.convert_to_tensor(self.kernel.value)
    return tf.function(lambda x, k: tf.tanh(tf.matmul(x, k)), jit_compile=True)(x, kernel)
