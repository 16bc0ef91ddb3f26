"""Sound models whose gradients are special: stopped, straight through, made by hand, absent."""

import keras
import numpy as np
import tensorflow as tf

from tests.zoo.entry import SAME
from tests.zoo.parts import on_features, on_images

layers, ops = keras.layers, keras.ops


class Unused(layers.Layer):
    """Has a weight that nothing depends on, and one that gives no gradient."""

    def build(self, shape):
        self.unused = self.add_weight(shape=(2, 2), name="unused")
        self.scores = self.add_weight(shape=(shape[-1], 3), name="scores")

    def call(self, x):
        best = tf.argmax(tf.matmul(x, self.scores), axis=-1)
        return x + 0.1 * tf.cast(best[:, None], x.dtype)


class Binary(layers.Layer):
    """Binary weights and rounded activations, gradients straight through."""

    def build(self, shape):
        self.kernel = self.add_weight(shape=(shape[-1], 5), name="kernel")

    def call(self, x):
        kernel = ops.convert_to_tensor(self.kernel)
        kernel += tf.stop_gradient(tf.sign(kernel) - kernel)
        x += tf.stop_gradient(tf.round(x * 4) / 4 - x)
        return tf.matmul(x, kernel)


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


class NumberOfExamples(layers.Layer):
    """Uses the size of its batch for shapes alone."""

    def build(self, shape):
        self.row = self.add_weight(shape=(1, shape[-1]), name="row")

    def call(self, x):
        num = tf.shape(x)[0]
        rows = tf.tile(self.row, [num, 1])
        return tf.reshape(tf.stack([x, rows], axis=1), [num, 2 * x.shape[1]])


class Edges(layers.Layer):
    """Finds edges by NumPy, an example at a time: TensorFlow does not see how."""

    def call(self, images):
        edges = tf.numpy_function(
            lambda x: np.abs(np.diff(x, axis=2, append=0)), [images], images.dtype
        )
        return tf.ensure_shape(edges, images.shape)


no_gradient = on_features(SAME, "None for a weight", Unused)
straight_through = on_features(SAME, "rounding that the gradient does not see", Binary)
custom_gradient_of_weight = on_features(SAME, "a weight's gradient by hand", OwnGradientOfItsWeight)
gradient_in_the_model = on_features(SAME, "a gradient of a gradient", Jacobian)
shapes_by_batch_size = on_features(SAME, "the number of examples in shapes alone", NumberOfExamples)
numpy_by_example = on_images(
    SAME,
    "Python code, but nothing that towers change",
    lambda: [Edges(), layers.Conv2D(3, 3)],
    quick=True,
)
