"""Layers in which examples see each other or how many there are, or that leave values behind."""

import keras
import tensorflow as tf

from tests.zoo.entry import SAME
from tests.zoo.parts import kept, layer, on_features, on_images, on_maps, own

layers, ops = keras.layers, keras.ops
MIXED = "inexact"


def computing(cause, why, function, **keywords):
    """Put in a layer that computes `function` of features."""
    return on_features(cause, why, lambda: layers.Lambda(function, name="guilty"), **keywords)


minus_mean = computing(
    MIXED, "the batch's mean", lambda x: x - tf.reduce_mean(x, axis=0), quick=True
)


@own(
    on_maps, MIXED, "moments by tf.nn.moments", then=lambda: [layers.ReLU()],
    gamma={"shape": (None,), "initializer": "ones"},
    beta={"shape": (None,), "initializer": "zeros"},
    mean=kept("zeros", (None,)), variance=kept("ones", (None,)),
)  # fmt: skip
def own_batch_norm(self, x, training):
    """BatchNorm as tutorials write it."""
    mean, variance = self.mean, self.variance
    if training:
        mean, variance = tf.nn.moments(x, axes=list(range(x.shape.rank - 1)))
        self.mean.assign(0.9 * self.mean + 0.1 * mean)
        self.variance.assign(0.9 * self.variance + 0.1 * variance)
    return (x - mean) / tf.sqrt(variance + 1e-3) * self.gamma + self.beta


def _conv():
    return layers.Conv2D(4, 3, activation="relu")


keras_mix_up = on_images(
    "random op",
    "Keras' layer mixes images, by a gamma draw",
    lambda: [layers.MixUp(alpha=0.4), _conv()],
)


@own(on_features, MIXED, "seeds begin again in each tower")
def draws_one_by_one(_, x, training):
    """Adds noise to each example by itself, by a seed of its place."""
    if not training:
        return x

    def with_noise(place):
        seed = tf.random.fold_in([1, 2], place)
        return x[place] + 0.1 * tf.random.stateless_normal(x.shape[1:], seed, dtype=x.dtype)

    places = tf.range(tf.shape(x)[0])
    return tf.ensure_shape(tf.map_fn(with_noise, places, fn_output_signature=x.dtype), x.shape)


place_as_feature = computing(
    MIXED,
    "a tower counts from the first of its slice",
    lambda x: x + 0.1 * tf.cast(tf.range(tf.shape(x)[0]), x.dtype)[:, None],
    quick=True,
)


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


rare_branch = computing(
    MIXED,
    "one large number changes all examples",
    lambda x: tf.cond(tf.reduce_any(x > 0.95), lambda: x / 2, lambda: x),
)


@own(on_features, "inexact", "a kernel's gradient is clipped in each tower", quick=True,
     kernel=(None, 5))  # fmt: skip
def kernel_clipped(self, x):
    @tf.custom_gradient
    def clipped(kernel):
        return tf.identity(kernel), lambda upstream: tf.clip_by_norm(upstream, 1e-3)

    return tf.matmul(x, clipped(tf.convert_to_tensor(self.kernel.value)))


@own(on_features, SAME, "a program of XLA's within the towers", kernel=(None, 5))
def compiled_inside(self, x):
    kernel = tf.convert_to_tensor(self.kernel.value)
    return tf.function(lambda x, k: tf.tanh(tf.matmul(x, k)), jit_compile=True)(x, kernel)
