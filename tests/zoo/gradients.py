"""Sound models whose gradients are special: stopped, straight through, made by hand, absent."""

import keras
import numpy as np
import tensorflow as tf

from tests.zoo.parts import on_features, on_maps

layers, ops = keras.layers, keras.ops


class Unused(layers.Layer):
    """Has a weight that nothing depends on, and one that gives no gradient."""

    def build(self, shape):
        self.unused = self.add_weight(shape=(2, 2), name="unused")
        self.scores = self.add_weight(shape=(shape[-1], 3), name="scores")

    def call(self, x):
        best = tf.argmax(tf.matmul(x, self.scores), axis=-1)
        return x + 0.1 * tf.cast(best[:, None], x.dtype)


def no_gradient(num_classes, image_shape):
    return on_features(num_classes, image_shape, Unused())


class Stopped(layers.Layer):
    def __init__(self):
        super().__init__()
        self.online, self.target = layers.Dense(5), layers.Dense(5)

    def build(self, shape):
        self.online.build(shape)
        self.target.build(shape)

    def call(self, x):
        return self.online(x) * tf.stop_gradient(self.target(x)) + self.online(ops.stop_gradient(x))


def stopped(num_classes, image_shape):
    return on_features(num_classes, image_shape, Stopped())


class Binary(layers.Layer):
    """Binary weights and rounded activations, gradients straight through."""

    def build(self, shape):
        self.kernel = self.add_weight(shape=(shape[-1], 5), name="kernel")

    def call(self, x):
        kernel = ops.convert_to_tensor(self.kernel)
        kernel += tf.stop_gradient(tf.sign(kernel) - kernel)
        x += tf.stop_gradient(tf.round(x * 4) / 4 - x)
        return tf.matmul(x, kernel)


def straight_through(num_classes, image_shape):
    return on_features(num_classes, image_shape, Binary())


@tf.custom_gradient
def reversed_gradient(x):
    return tf.identity(x), lambda upstream: -0.5 * upstream


@tf.custom_gradient
def clipped_sign(x):
    return tf.sign(x), lambda upstream: tf.where(tf.abs(x) < 1, upstream, 0)


class ByHand(layers.Layer):
    def call(self, x):
        return reversed_gradient(x) + clipped_sign(2 * x)


def custom_gradient(num_classes, image_shape):
    return on_features(num_classes, image_shape, ByHand())


class OwnGradientOfItsWeight(layers.Layer):
    """A dense layer whose custom gradient is of its weight, too."""

    def build(self, shape):
        self.kernel = self.add_weight(shape=(shape[-1], 5), name="kernel")

    def call(self, x):
        @tf.custom_gradient
        def multiply(x, kernel):
            def gradient(upstream):
                of_kernel = tf.matmul(x, upstream, transpose_a=True)
                return tf.matmul(upstream, kernel, transpose_b=True), 2 * of_kernel

            return tf.matmul(x, kernel), gradient

        return multiply(x, tf.identity(self.kernel.value))


def custom_gradient_of_weight(num_classes, image_shape):
    return on_features(num_classes, image_shape, OwnGradientOfItsWeight())


class HyperNetwork(layers.Layer):
    """Makes a kernel for each example."""

    def __init__(self):
        super().__init__()
        self.make = layers.Dense(24)

    def build(self, shape):
        self.make.build(shape)

    def call(self, x):
        kernels = ops.reshape(self.make(x), (-1, 6, 4))
        return ops.squeeze(ops.matmul(x[:, None], kernels), axis=1)


def hyper_network(num_classes, image_shape):
    return on_features(num_classes, image_shape, HyperNetwork())


class Jacobian(layers.Layer):
    """Features and how each example's energy changes with them: a gradient in the model."""

    def __init__(self):
        super().__init__()
        self.energy = layers.Dense(1, activation="softplus")

    def build(self, shape):
        self.energy.build(shape)

    def call(self, x):
        with tf.GradientTape() as tape:
            tape.watch(x)
            energy = self.energy(x)
        return tf.concat([x, tape.gradient(energy, x)], axis=1)


def gradient_in_the_model(num_classes, image_shape):
    return on_features(num_classes, image_shape, Jacobian())


class NumberOfExamples(layers.Layer):
    """Uses the size of its batch for shapes alone."""

    def build(self, shape):
        self.row = self.add_weight(shape=(1, shape[-1]), name="row")

    def call(self, x):
        num = tf.shape(x)[0]
        rows = tf.tile(self.row, [num, 1])
        return tf.reshape(tf.stack([x, rows], axis=1), [num, 2 * x.shape[1]])


def shapes_by_batch_size(num_classes, image_shape):
    return on_features(num_classes, image_shape, NumberOfExamples())


class Edges(layers.Layer):
    """Finds edges by NumPy, an example at a time: TensorFlow does not see how."""

    def call(self, images):
        edges = tf.numpy_function(
            lambda x: np.abs(np.diff(x, axis=2, append=0)), [images], images.dtype
        )
        return tf.ensure_shape(edges, images.shape)


def numpy_by_example(num_classes, image_shape):
    return keras.Sequential(
        [
            keras.Input(image_shape),
            Edges(),
            layers.Conv2D(3, 3),
            layers.Flatten(),
            layers.Dense(num_classes),
        ]
    )


class TopPlaces(layers.Layer):
    """Keeps the strongest places of each map; the gradient goes through them alone."""

    def call(self, x):
        flat = ops.reshape(x, (-1, x.shape[1] * x.shape[2], x.shape[3]))
        best = ops.top_k(ops.transpose(flat, (0, 2, 1)), 3)[0]
        kept = ops.where(x >= best[:, None, None, :, -1], x, 0.0)
        return kept - ops.median(x, axis=(1, 2), keepdims=True)


def top_places(num_classes, image_shape):
    return on_maps(num_classes, image_shape, TopPlaces())
