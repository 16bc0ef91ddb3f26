"""Layers that let the examples of a batch see each other, or that see how many there are."""

import keras
import tensorflow as tf

from tests.zoo.parts import Seeded, on_features, on_maps, on_rows

layers, ops = keras.layers, keras.ops


def with_features(function):
    """Return a model function around a layer that computes `function`."""

    def model(num_classes, image_shape):
        return on_features(num_classes, image_shape, layers.Lambda(function, name="guilty"))

    return model


minus_mean = with_features(lambda x: x - tf.reduce_mean(x, axis=0))
batch_softmax = with_features(lambda x: tf.nn.softmax(x, axis=0))
running_sum = with_features(lambda x: tf.cumsum(x, axis=0) / 4)
rolled = with_features(lambda x: x + 0.5 * tf.roll(x, 1, axis=0))
reversed_batch = with_features(lambda x: tf.concat([x, x[::-1]], axis=1))
sorted_batch = with_features(lambda x: ops.sort(x, axis=0))
whole_norm = with_features(tf.math.l2_normalize)
by_largest = with_features(lambda x: x / tf.reduce_max(tf.abs(x)))
first_as_reference = with_features(lambda x: x - x[:1])


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


def own_batch_norm(num_classes, image_shape):
    return on_maps(num_classes, image_shape, OwnBatchNorm(), layers.ReLU())


class GhostBatchNorm(layers.Layer):
    """Normalises the halves of a batch apart."""

    def build(self, shape):
        self.gamma = self.add_weight(shape=(shape[-1],), initializer="ones", name="gamma")

    def call(self, x, training=False):
        if not training:
            return x * self.gamma
        half, parts = (tf.shape(x)[0] + 1) // 2, []
        for part in (x[:half], x[half:]):
            mean, variance = tf.nn.moments(part, axes=[0, 1, 2])
            parts.append((part - mean) * tf.math.rsqrt(variance + 1e-3))
        return tf.concat(parts, axis=0) * self.gamma


def ghost_batch_norm(num_classes, image_shape):
    return on_maps(num_classes, image_shape, GhostBatchNorm(), layers.ReLU())


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


def pairwise(num_classes, image_shape):
    return on_features(num_classes, image_shape, Similarities())


class Discrimination(layers.Layer):
    """Minibatch discrimination (Salimans et al. 2016)."""

    def build(self, shape):
        self.kernel = self.add_weight(shape=(shape[-1], 3, 2), name="kernel")

    def call(self, x):
        y = tf.einsum("bi,ijk->bjk", x, self.kernel)
        far = tf.reduce_sum(tf.abs(y[:, None] - y[None]), axis=3)
        return tf.concat([x, tf.reduce_sum(tf.exp(-far), axis=1)], axis=1)


def discrimination(num_classes, image_shape):
    return on_features(num_classes, image_shape, Discrimination())


class OverTheWrongAxis(layers.Layer):
    """Attention that takes the batch for the time."""

    def __init__(self):
        super().__init__()
        self.attention = layers.MultiHeadAttention(1, 4)

    def build(self, shape):
        self.attention.build((shape[1], None, shape[2]), (shape[1], None, shape[2]))

    def call(self, x):
        x = ops.transpose(x, (1, 0, 2))
        return ops.transpose(self.attention(x, x), (1, 0, 2))


def attention_over_the_batch(num_classes, image_shape):
    return on_rows(num_classes, image_shape, OverTheWrongAxis())


class Shuffled(Seeded):
    def call(self, x, training=False):
        return x + 0.3 * keras.random.shuffle(x, seed=self.seed) if training else x


def shuffled(num_classes, image_shape):
    return on_features(num_classes, image_shape, Shuffled())


class ManifoldMixup(Seeded):
    """Mixes each example with its neighbour, by a weight of its own."""

    def call(self, x, training=False):
        if not training:
            return x
        weights = keras.random.uniform((ops.shape(x)[0], 1, 1, 1), dtype=x.dtype, seed=self.seed)
        return weights * x + (1 - weights) * x[::-1]


def manifold_mixup(num_classes, image_shape):
    return on_maps(num_classes, image_shape, ManifoldMixup())


def _augmented(layer, num_classes, image_shape):
    return keras.Sequential(
        [
            keras.Input(image_shape),
            layer,
            layers.Conv2D(4, 3, activation="relu"),
            layers.Flatten(),
            layers.Dense(num_classes),
        ]
    )


def keras_mix_up(num_classes, image_shape):
    return _augmented(layers.MixUp(alpha=0.4), num_classes, image_shape)


class Equalised(layers.Layer):
    def __init__(self):
        super().__init__()
        self.equalize = layers.Equalization()

    def call(self, x, training=False):
        return self.equalize(128 + 40 * x, training=training) / 128 - 1


def keras_equalization(num_classes, image_shape):
    return _augmented(Equalised(), num_classes, image_shape)


def keras_cut_mix(num_classes, image_shape):
    return _augmented(layers.CutMix(factor=0.9), num_classes, image_shape)


class UntilAllAreDone(layers.Layer):
    """Repeats a map of all examples until the last of them has converged."""

    def call(self, x):
        def going_on(y):
            return tf.reduce_any(tf.norm(y, axis=1) > 0.5)

        return tf.while_loop(going_on, lambda y: [0.9 * y], [x])[0]


def until_all_are_done(num_classes, image_shape):
    return on_features(num_classes, image_shape, UntilAllAreDone())


class Experts(layers.Layer):
    """Experts with room for two examples each: who comes late goes without."""

    def build(self, shape):
        self.gate = self.add_weight(shape=(shape[-1], 2), name="gate")
        self.experts = self.add_weight(shape=(2, shape[-1], shape[-1]), name="experts")

    def call(self, x):
        scores = tf.nn.softmax(tf.matmul(x, self.gate))
        chosen = tf.one_hot(tf.argmax(scores, axis=-1), 2, dtype=x.dtype)
        place = tf.cumsum(chosen, axis=0)
        kept = chosen * tf.cast(place <= 2, x.dtype) * scores
        return x + tf.einsum("be,bi,eio->bo", kept, x, self.experts)


def experts_with_capacity(num_classes, image_shape):
    return on_features(num_classes, image_shape, Experts())


class HardExamples(layers.Layer):
    """Lets gradients through for the larger half of the batch alone."""

    def call(self, x):
        sizes = ops.norm(x, axis=1, keepdims=True)
        return ops.where(sizes >= ops.median(sizes), x, ops.stop_gradient(x))


def hard_examples(num_classes, image_shape):
    return on_features(num_classes, image_shape, HardExamples())


# -------------------------------------------------------------------------------- Where they are


place_as_feature = with_features(
    lambda x: x + 0.1 * tf.cast(tf.range(tf.shape(x)[0]), x.dtype)[:, None]
)


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


def draws_one_by_one(num_classes, image_shape):
    return on_features(num_classes, image_shape, DrawsOneByOne())


# ---------------------------------------------------------------------------- How many there are


def _number(x):
    return tf.cast(tf.shape(x)[0], x.dtype)


divided_by_number = with_features(lambda x: x / _number(x))
times_root_of_number = with_features(lambda x: x * tf.sqrt(_number(x)))


class SizeAsFeature(layers.Layer):
    """Appends a learned multiple of the logarithm of the batch size."""

    def build(self, shape):
        self.weight = self.add_weight(shape=(2,), initializer="ones", name="weight")

    def call(self, x):
        size = ops.log(ops.cast(ops.shape(x)[0], x.dtype)) * self.weight
        return ops.concatenate([x, ops.zeros_like(x[:, :2]) + size], axis=1)


def size_as_feature(num_classes, image_shape):
    return on_features(num_classes, image_shape, SizeAsFeature())


@tf.custom_gradient
def _mean_gradient(x):
    return tf.identity(x), lambda upstream: upstream / tf.cast(tf.shape(x)[0], x.dtype)


mean_gradient = with_features(lambda x: _mean_gradient(x))
