"""Layers that let the examples of a batch see each other, or that see how many there are."""

import keras
import tensorflow as tf

from tests.zoo.parts import kept, on_features, on_images, on_maps, own

layers, ops = keras.layers, keras.ops
MIXED = "inexact"


def computing(cause, why, function, **keywords):
    """Put in a layer that computes `function` of features."""
    return on_features(cause, why, lambda: layers.Lambda(function, name="guilty"), **keywords)


minus_mean = computing(
    MIXED, "the batch's mean", lambda x: x - tf.reduce_mean(x, axis=0), quick=True
)
branch_at_a_mean = computing(
    MIXED, "a branch of all", lambda x: tf.cond(tf.reduce_mean(x) > 0, lambda: 2 * x, lambda: -x)
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


# -------------------------------------------------------------- Where they are, how many there are


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


@tf.custom_gradient
def _mean_gradient(x):
    return tf.identity(x), lambda upstream: upstream / tf.cast(tf.shape(x)[0], x.dtype)


place_as_feature = computing(
    MIXED,
    "a tower counts from the first of its slice",
    lambda x: x + 0.1 * tf.cast(tf.range(tf.shape(x)[0]), x.dtype)[:, None],
    quick=True,
)
mean_gradient = computing(
    MIXED, "the gradient alone is divided", lambda x: _mean_gradient(x), quick=True
)
