"""Layers that let the examples of a batch see each other, or that see how many there are."""

import keras
import tensorflow as tf

from tests.zoo.parts import kept, on_features, on_images, on_maps, own, seed

layers, ops = keras.layers, keras.ops
MIXED = "inexact"


def computing(cause, why, function, **keywords):
    """Put in a layer that computes `function` of features."""
    return on_features(cause, why, lambda: layers.Lambda(function, name="guilty"), **keywords)


minus_mean = computing(
    MIXED, "the batch's mean", lambda x: x - tf.reduce_mean(x, axis=0), quick=True
)
batch_softmax = computing(MIXED, "softmax along the batch", lambda x: tf.nn.softmax(x, axis=0))
rolled = computing(MIXED, "takes from its neighbour", lambda x: x + 0.5 * tf.roll(x, 1, axis=0))
sorted_batch = computing(MIXED, "places change", lambda x: ops.sort(x, axis=0))
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


@own(on_features, MIXED, "keras.random.shuffle", seed=seed)
def shuffled(self, x, training):
    return x + 0.3 * keras.random.shuffle(x, seed=self.seed) if training else x


def _conv():
    return layers.Conv2D(4, 3, activation="relu")


keras_mix_up = on_images(
    "random op",
    "Keras' layer mixes images, by a gamma draw",
    lambda: [layers.MixUp(alpha=0.4), _conv()],
)


@own(on_images, MIXED, "Keras' layer makes one histogram of all images",
     equalize=lambda: layers.Equalization(), then=lambda: [_conv()])  # fmt: skip
def keras_equalization(self, x, training):
    return self.equalize(128 + 40 * x, training=training) / 128 - 1


@own(on_features, MIXED, "the slowest decides when the loop ends")
def until_all_are_done(_, x):
    """Repeats a map of all examples until the last of them has converged."""
    going_on = lambda y: tf.reduce_any(tf.norm(y, axis=1) > 0.5)  # noqa: E731
    return tf.while_loop(going_on, lambda y: [0.9 * y], [x])[0]


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


def _number(x):
    return tf.cast(tf.shape(x)[0], x.dtype)


@tf.custom_gradient
def _mean_gradient(x):
    return tf.identity(x), lambda upstream: upstream / tf.cast(tf.shape(x)[0], x.dtype)


place_as_feature = computing(
    MIXED,
    "a tower counts from the first of its slice",
    lambda x: x + 0.1 * tf.cast(tf.range(tf.shape(x)[0]), x.dtype)[:, None],
    quick=True,
)
divided_by_number = computing(MIXED, "a sum where a mean is meant", lambda x: x / _number(x))
mean_gradient = computing(
    MIXED, "the gradient alone is divided", lambda x: _mean_gradient(x), quick=True
)
