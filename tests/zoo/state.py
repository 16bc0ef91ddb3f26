"""Variables that a model assigns in its call: what towers can put together, and what they cannot.

Each layer but the last few changes nothing but its variables, or uses them as they were before.
"""

import keras
import tensorflow as tf

from tests.zoo.parts import Seeded, on_features, on_maps

layers, ops = keras.layers, keras.ops


def tracked(shape, update, **keywords):
    """Return a layer with a variable of `shape` that `update(value, x)` gives in training."""

    class Tracked(layers.Layer):
        def build(self, _):
            self.value = self.add_weight(
                shape=shape, trainable=False, name="value", **({"initializer": "zeros"} | keywords)
            )

        def call(self, x, training=False):
            if training:
                before = ops.convert_to_tensor(self.value)
                self.value.assign(ops.cast(update(before, x), before.dtype))
            return x

    return Tracked()


# ------------------------------------------------------------------------------------------ Sound


class Annealed(layers.Layer):
    """Counts examples, in a float and in an integer, and cools down as it has seen more."""

    def build(self, shape):
        zeros = {"shape": (), "initializer": "zeros", "trainable": False}
        self.seen = self.add_weight(**zeros, name="seen")
        self.number = self.add_weight(**zeros, dtype="int64", name="number")

    def call(self, x, training=False):
        y = x / (1 + 0.05 * self.seen)
        if training:
            self.seen.assign_add(ops.cast(ops.shape(x)[0], self.seen.dtype))
            self.number.assign_add(ops.cast(ops.shape(x)[0], "int64"))
        return y


def counters_of_examples(num_classes, image_shape):
    return on_features(num_classes, image_shape, Annealed())


class WarmUp(layers.Layer):
    """Counts its calls, in a float and in an integer."""

    def build(self, shape):
        zeros = {"shape": (), "initializer": "zeros", "trainable": False}
        self.calls = self.add_weight(**zeros, name="calls")
        self.number = self.add_weight(**zeros, dtype="int32", name="number")

    def call(self, x, training=False):
        if training:
            self.calls.assign_add(1)
            self.number.assign_add(1)
        return x * (1 - 0.5 ** (1 + self.calls))


def counters_of_calls(num_classes, image_shape):
    return on_features(num_classes, image_shape, WarmUp())


def histogram(num_classes, image_shape):
    def update(value, x):
        return value + ops.sum(ops.one_hot(ops.argmax(x, axis=-1), 6, dtype="int32"), axis=0)

    return on_features(num_classes, image_shape, tracked((6,), update, dtype="int32"))


def running_range(num_classes, image_shape):
    def largest(value, x):
        return ops.maximum(value, ops.max(x, axis=0))

    def smallest(value, x):
        return ops.minimum(value, ops.min(x, axis=0))

    low = keras.initializers.Constant(-9.0)
    return on_features(
        num_classes,
        image_shape,
        tracked((6,), largest, initializer=low),
        tracked((6,), smallest, initializer="ones"),
    )


class Centred(layers.Layer):
    """Subtracts a moving average of the mean, as it was before this batch."""

    def build(self, shape):
        self.mean = self.add_weight(
            shape=(shape[-1],), initializer="zeros", trainable=False, name="mean"
        )

    def call(self, x, training=False):
        y = x - self.mean
        if training:
            mean = ops.mean(x, axis=tuple(range(len(x.shape) - 1)))
            self.mean.assign(0.8 * self.mean + 0.2 * mean)
        return y


def moving_mean(num_classes, image_shape):
    return on_maps(num_classes, image_shape, Centred(), layers.Conv2D(4, 3), Centred())


def float_sums(num_classes, image_shape):
    def update(value, x):
        return value + ops.sum(ops.square(x), axis=0)

    return on_features(num_classes, image_shape, tracked((6,), update))


def given_policies(num_classes, image_shape):
    def add(value, x):
        return value + ops.sum(ops.cast(x > 0, value.dtype))

    return on_features(
        num_classes,
        image_shape,
        tracked((), add, aggregation="sum"),
        tracked((6,), lambda v, x: 0.9 * v + 0.1 * ops.mean(x, axis=0), aggregation="mean"),
        tracked((), lambda v, x: 2 * v + 1, aggregation="only_first_replica"),
    )


def constant_state(num_classes, image_shape):
    """Powers that do not depend on the batch: each tower has the same."""
    start = keras.initializers.Constant(1.0)
    layer = tracked((2,), lambda value, x: value * [0.9, 0.99], initializer=start)
    return on_features(num_classes, image_shape, layer)


class AverageOfItsWeight(layers.Layer):
    """Keeps a moving average of its own kernel, and computes with both."""

    def build(self, shape):
        self.kernel = self.add_weight(shape=(shape[-1], 5), name="kernel")
        self.average = self.add_weight(
            shape=(shape[-1], 5), initializer="zeros", trainable=False, name="average"
        )

    def call(self, x, training=False):
        if training:
            self.average.assign(0.9 * self.average + 0.1 * self.kernel)
        return ops.matmul(x, self.kernel) + ops.matmul(x, self.average)


def average_of_weights(num_classes, image_shape):
    return on_features(num_classes, image_shape, AverageOfItsWeight())


class NoiseByState(Seeded):
    """Adds noise that grows with the number of calls."""

    def build(self, shape):
        self.level = self.add_weight(shape=(), initializer="ones", trainable=False, name="level")

    def call(self, x, training=False):
        if not training:
            return x
        self.level.assign(self.level * 1.5)
        noise = keras.random.normal(ops.shape(x), dtype=x.dtype, seed=self.seed)
        return x + 0.1 * self.level * noise


def growing_noise(num_classes, image_shape):
    return on_features(num_classes, image_shape, NoiseByState())


# ------------------------------------------------------------------- What cannot be put together


def last_example(num_classes, image_shape):
    return on_features(num_classes, image_shape, tracked((6,), lambda value, x: x[-1]))


def product(num_classes, image_shape):
    def update(value, x):
        return value * ops.prod(1 + x, axis=0)

    return on_features(num_classes, image_shape, tracked((6,), update, initializer="ones"))


def moving_variance(num_classes, image_shape):
    def update(value, x):
        return 0.9 * value + 0.1 * ops.var(x, axis=(0, 1, 2))

    return on_maps(num_classes, image_shape, tracked((4,), update))


def memory_bank(num_classes, image_shape):
    """A queue of the newest features (He et al. 2020)."""

    def update(queue, x):
        return ops.concatenate([tf.stop_gradient(x), queue], axis=0)[:16]

    return on_features(num_classes, image_shape, tracked((16, 6), update))


def root_mean_square(num_classes, image_shape):
    def update(value, x):
        return 0.5 * value + 0.5 * ops.sqrt(ops.mean(ops.square(x), axis=0))

    return on_features(num_classes, image_shape, tracked((6,), update))


class Codebook(layers.Layer):
    """Vectors that follow averages of what is near them (van den Oord et al. 2017)."""

    def build(self, shape):
        start = keras.initializers.RandomUniform(seed=1)
        self.codes = self.add_weight(
            shape=(5, shape[-1]), initializer=start, trainable=False, name="codes"
        )

    def call(self, x, training=False):
        codes = 1.0 * self.codes  # of before this step
        far = ops.sum(ops.square(x[:, None] - codes), axis=-1)
        chosen = ops.one_hot(ops.argmin(far, axis=-1), 5, dtype=x.dtype)
        if training:
            counts = ops.sum(chosen, axis=0)[:, None]
            means = ops.matmul(ops.transpose(chosen), x) / ops.maximum(counts, 1)
            self.codes.assign(ops.where(counts > 0, 0.9 * codes + 0.1 * means, codes))
        return x + tf.stop_gradient(ops.matmul(chosen, codes) - x)


def codebook(num_classes, image_shape):
    return on_features(num_classes, image_shape, Codebook())
