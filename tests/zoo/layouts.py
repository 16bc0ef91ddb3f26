"""Draws whose examples do not lie along the first axis, or that belong to no example at all."""

import keras
import tensorflow as tf

from tests.zoo.parts import Seeded, on_features, on_maps, on_rows

layers, ops, random = keras.layers, keras.ops, keras.random


class Dropped(layers.Layer):
    """Has one dropout layer; its children lay the values out before it, and back after it."""

    def __init__(self):
        super().__init__()
        self.dropout = layers.Dropout(0.4, seed=1)


class ByTime(Dropped):
    def call(self, x, training=False):
        flat = tf.reshape(x, [-1, x.shape[2]])
        return tf.reshape(self.dropout(flat, training=training), tf.shape(x))


def times_in_rows(num_classes, image_shape):
    return on_rows(num_classes, image_shape, ByTime())


class TimeMajor(Dropped):
    def call(self, x, training=False):
        x = self.dropout(tf.transpose(x, [1, 0, 2]), training=training)
        return tf.transpose(x, [1, 0, 2])


def time_major(num_classes, image_shape):
    return on_rows(num_classes, image_shape, TimeMajor())


class TimeMajorRows(Dropped):
    def call(self, x, training=False):
        by_time = tf.transpose(x, [1, 0, 2])
        dropped = self.dropout(tf.reshape(by_time, [-1, x.shape[2]]), training=training)
        return tf.transpose(tf.reshape(dropped, tf.shape(by_time)), [1, 0, 2])


def time_major_rows(num_classes, image_shape):
    return on_rows(num_classes, image_shape, TimeMajorRows())


class HeadsFirst(Dropped):
    """Attention whose heads are joined along the batch: [heads * B, T, T]."""

    def call(self, x, training=False):
        heads = tf.concat(tf.split(x, 2, axis=2), axis=0)
        weights = tf.nn.softmax(tf.matmul(heads, heads, transpose_b=True))
        heads = tf.matmul(self.dropout(weights, training=training), heads)
        return tf.concat(tf.split(heads, 2, axis=0), axis=2)


def heads_first(num_classes, image_shape):
    return on_rows(num_classes, image_shape, HeadsFirst())


class HeadsLast(Dropped):
    """Attention whose heads are folded into the batch: [B * heads, T, T]."""

    def call(self, x, training=False):
        times, size = x.shape[1:]
        heads = tf.transpose(tf.reshape(x, [-1, times, 2, size // 2]), [0, 2, 1, 3])
        heads = tf.reshape(heads, [-1, times, size // 2])
        weights = tf.nn.softmax(tf.matmul(heads, heads, transpose_b=True))
        heads = tf.matmul(self.dropout(weights, training=training), heads)
        heads = tf.reshape(heads, [-1, 2, times, size // 2])
        return tf.reshape(tf.transpose(heads, [0, 2, 1, 3]), tf.shape(x))


def heads_last(num_classes, image_shape):
    return on_rows(num_classes, image_shape, HeadsLast())


class Windows(Dropped):
    """Attention inside of windows of 3 x 3 places: [B * windows, 9, C] (Liu et al. 2021)."""

    def call(self, x, training=False):
        _, height, width, size = x.shape
        split = ops.reshape(x, (-1, height // 3, 3, width // 3, 3, size))
        windows = ops.reshape(ops.transpose(split, (0, 1, 3, 2, 4, 5)), (-1, 9, size))
        weights = ops.softmax(ops.matmul(windows, ops.transpose(windows, (0, 2, 1))))
        windows = ops.matmul(self.dropout(weights, training=training), windows)
        split = ops.reshape(windows, (-1, height // 3, width // 3, 3, 3, size))
        return ops.reshape(ops.transpose(split, (0, 1, 3, 2, 4, 5)), (-1, height, width, size))


def windows(num_classes, image_shape):
    return on_maps(num_classes, image_shape, Windows())


class Flat(Dropped):
    def call(self, x, training=False):
        return tf.reshape(self.dropout(tf.reshape(x, [-1]), training=training), tf.shape(x))


def flat(num_classes, image_shape):
    return on_rows(num_classes, image_shape, Flat())


class FeaturesFirst(Dropped):
    def call(self, x, training=False):
        return tf.transpose(self.dropout(tf.transpose(x), training=training))


def features_first(num_classes, image_shape):
    return on_features(num_classes, image_shape, FeaturesFirst())


class TwoViews(Dropped):
    """Sends each example through dropout twice, one copy of the batch after the other."""

    def call(self, x, training=False):
        views = self.dropout(tf.concat([x, x], axis=0), training=training)
        first, second = tf.split(views, 2, axis=0)
        return (first + tf.tanh(second)) / 2


def two_views(num_classes, image_shape):
    return on_features(num_classes, image_shape, TwoViews())


class Repeated(Dropped):
    """Sends each example through dropout twice, its copies side by side."""

    def call(self, x, training=False):
        copies = self.dropout(tf.repeat(x, 2, axis=0), training=training)
        return tf.reduce_max(tf.reshape(copies, [-1, 2, x.shape[1]]), axis=1)


def repeated(num_classes, image_shape):
    return on_features(num_classes, image_shape, Repeated())


class OneMore(Dropped):
    """Has an axis of one before that of the batch."""

    def call(self, x, training=False):
        return self.dropout(x[None], training=training)[0]


def one_more_axis(num_classes, image_shape):
    return on_rows(num_classes, image_shape, OneMore())


# ---------------------------------------------------- Of the whole batch, as long as a slice or not


class SampledKernel(Seeded):
    """Draws a kernel for all examples at once, with as many rows as it is told."""

    def __init__(self, num_rows):
        super().__init__()
        self.num_rows = num_rows

    def build(self, shape):
        self.inner = self.add_weight(shape=(shape[-1], self.num_rows), name="inner")
        self.scale = self.add_weight(shape=(self.num_rows, 5), initializer="ones", name="scale")

    def call(self, x, training=False):
        kernel = ops.convert_to_tensor(self.scale)
        if training:
            kernel *= random.normal(kernel.shape, dtype=x.dtype, seed=self.seed)
        return ops.matmul(ops.matmul(x, self.inner), kernel)


def kernel_of_two_rows(num_classes, image_shape):
    return on_features(num_classes, image_shape, SampledKernel(2))


def kernel_of_three_rows(num_classes, image_shape):
    return on_features(num_classes, image_shape, SampledKernel(3))


def kernel_of_four_rows(num_classes, image_shape):
    return on_features(num_classes, image_shape, SampledKernel(4))


def kernel_of_seven_rows(num_classes, image_shape):
    return on_features(num_classes, image_shape, SampledKernel(7))


class DropConnect(Seeded):
    """A dense layer that drops weights, not activations (Wan et al. 2013)."""

    def __init__(self, units):
        super().__init__()
        self.units = units

    def build(self, shape):
        self.kernel = self.add_weight(shape=(shape[-1], self.units), name="kernel")

    def call(self, x, training=False):
        kernel = self.kernel
        if training:
            kernel = random.dropout(ops.convert_to_tensor(kernel), 0.3, seed=self.seed)
        return ops.matmul(x, kernel)


def drop_connect(num_classes, image_shape):
    return on_rows(num_classes, image_shape, DropConnect(3), DropConnect(4))


class NoisyPositions(Seeded):
    """Adds a table of positions [T, C] with noise that all examples share."""

    def build(self, shape):
        self.table = self.add_weight(shape=shape[1:], name="table")

    def call(self, x, training=False):
        if not training:
            return x + self.table
        noise = random.normal(x.shape[1:], stddev=0.3, dtype=x.dtype, seed=self.seed)
        return x + self.table * (1 + noise)


def noisy_positions(num_classes, image_shape):
    return on_rows(num_classes, image_shape, layers.MaxPooling1D(4), NoisyPositions())


class PairOfScales(Seeded):
    """Draws a range of two numbers for the batch, then one in it for each example."""

    def call(self, x, training=False):
        if not training:
            return x
        low, high = tf.unstack(random.uniform((2,), dtype=x.dtype, seed=self.seed))
        each = random.uniform((ops.shape(x)[0], 1), dtype=x.dtype, seed=self.seed)
        return x * (low + (high - low) * each)


def pair_of_scales(num_classes, image_shape):
    return on_features(num_classes, image_shape, PairOfScales())


class RandomProjections(Seeded):
    """Draws a stack of kernels [4, C, C], of which each example takes one."""

    def call(self, x, training=False):
        size = x.shape[-1]
        kernels = random.normal((4, size, size), dtype=x.dtype, seed=self.seed)
        chosen = ops.cast(ops.argmax(x, axis=-1) % 4, "int32")
        return ops.einsum("bi,bij->bj", x, ops.take(kernels, chosen, axis=0)) / size


def random_projections(num_classes, image_shape):
    return on_features(num_classes, image_shape, RandomProjections())
