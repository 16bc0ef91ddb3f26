"""Layers that let the examples of a batch see each other, or that see how many there are."""

import keras
import tensorflow as tf

from tests.zoo.parts import Seeded, on_features, on_images, on_maps

layers, ops = keras.layers, keras.ops
MIXED = "mixed examples"


def computing(cause, why, function, **keywords):
    """Put in a layer that computes `function` of features."""
    return on_features(cause, why, lambda: layers.Lambda(function, name="guilty"), **keywords)


minus_mean = computing(
    MIXED, "the batch's mean", lambda x: x - tf.reduce_mean(x, axis=0), quick=True
)
batch_softmax = computing(MIXED, "softmax along the batch", lambda x: tf.nn.softmax(x, axis=0))
running_sum = computing(MIXED, "cumsum along the batch", lambda x: tf.cumsum(x, axis=0) / 4)
rolled = computing(MIXED, "takes from its neighbour", lambda x: x + 0.5 * tf.roll(x, 1, axis=0))
sorted_batch = computing(MIXED, "places change", lambda x: ops.sort(x, axis=0))
by_largest = computing(MIXED, "the largest of all examples", lambda x: x / tf.reduce_max(tf.abs(x)))
first_as_reference = computing(MIXED, "all look at the first", lambda x: x - x[:1])


class OwnBatchNorm(layers.Layer):
    """BatchNorm as tutorials write it."""

    def build(self, shape):
        size = {"shape": (shape[-1],)}
        self.gamma = self.add_weight(**size, initializer="ones", name="gamma")
        self.beta = self.add_weight(**size, initializer="zeros", name="beta")
        fixed = size | {"trainable": False}
        self.mean = self.add_weight(**fixed, initializer="zeros", name="moving_mean")
        self.variance = self.add_weight(**fixed, initializer="ones", name="moving_variance")

    def call(self, x, training=False):
        mean, variance = self.mean, self.variance
        if training:
            mean, variance = tf.nn.moments(x, axes=list(range(x.shape.rank - 1)))
            self.mean.assign(0.9 * self.mean + 0.1 * mean)
            self.variance.assign(0.9 * self.variance + 0.1 * variance)
        return (x - mean) / tf.sqrt(variance + 1e-3) * self.gamma + self.beta


class Similarities(layers.Layer):
    """Each example takes from those that are like it."""

    def __init__(self):
        super().__init__()
        self.query, self.key = layers.Dense(3), layers.Dense(3)

    def build(self, shape):
        self.query.build(shape)
        self.key.build(shape)

    def call(self, x):
        scores = tf.matmul(self.query(x), self.key(x), transpose_b=True)
        return x + tf.matmul(tf.nn.softmax(scores), x)


class Shuffled(Seeded):
    def call(self, x, training=False):
        return x + 0.3 * keras.random.shuffle(x, seed=self.seed) if training else x


class Equalised(layers.Layer):
    def __init__(self):
        super().__init__()
        self.equalize = layers.Equalization()

    def call(self, x, training=False):
        return self.equalize(128 + 40 * x, training=training) / 128 - 1


class UntilAllAreDone(layers.Layer):
    """Repeats a map of all examples until the last of them has converged."""

    def call(self, x):
        def going_on(y):
            return tf.reduce_any(tf.norm(y, axis=1) > 0.5)

        return tf.while_loop(going_on, lambda y: [0.9 * y], [x])[0]


class HardExamples(layers.Layer):
    """Lets gradients through for the larger half of the batch alone."""

    def call(self, x):
        sizes = ops.norm(x, axis=1, keepdims=True)
        return ops.where(sizes >= ops.median(sizes), x, ops.stop_gradient(x))


own_batch_norm = on_maps(MIXED, "moments by tf.nn.moments", lambda: [OwnBatchNorm(), layers.ReLU()])
pairwise = on_features(MIXED, "similarity of all pairs", Similarities)
shuffled = on_features(MIXED, "keras.random.shuffle", Shuffled)
keras_mix_up = on_images(
    MIXED,
    "Keras' layer mixes images",
    lambda: [layers.MixUp(alpha=0.4), layers.Conv2D(4, 3, activation="relu")],
)
keras_equalization = on_images(
    MIXED,
    "Keras' layer makes one histogram of all images",
    lambda: [Equalised(), layers.Conv2D(4, 3, activation="relu")],
)
until_all_are_done = on_features(MIXED, "the slowest decides when the loop ends", UntilAllAreDone)
hard_examples = on_features(MIXED, "the median decides whose gradient counts", HardExamples)


# -------------------------------------------------------------- Where they are, how many there are


class DrawsOneByOne(layers.Layer):
    """Adds noise to each example by itself, by a seed of its place."""

    def call(self, x, training=False):
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
    "place in the batch",
    "a tower counts from the first of its slice",
    lambda x: x + 0.1 * tf.cast(tf.range(tf.shape(x)[0]), x.dtype)[:, None],
    quick=True,
)
draws_one_by_one = on_features(
    "place in the batch", "seeds begin again in each tower", DrawsOneByOne
)
divided_by_number = computing("batch size", "a sum where a mean is meant", lambda x: x / _number(x))
mean_gradient = computing(
    "batch size", "the gradient alone is divided", lambda x: _mean_gradient(x), quick=True
)
