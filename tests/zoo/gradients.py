"""Sound models whose gradients are special: stopped, straight through, made by hand, absent."""

import keras
import numpy as np
import tensorflow as tf

from tests.zoo.entry import SAME
from tests.zoo.parts import on_features, on_images, own

layers, ops = keras.layers, keras.ops


@own(on_features, SAME, "None for a weight", unused=(2, 2), scores=(None, 3))
def no_gradient(self, x):
    """Has a weight that nothing depends on, and one that gives no gradient."""
    best = tf.argmax(tf.matmul(x, self.scores), axis=-1)
    return x + 0.1 * tf.cast(best[:, None], x.dtype)


@own(on_features, SAME, "a weight that some towers use, and one that none does",
     kernel={"shape": (None,), "initializer": "ones"}, unused=(2, 2))  # fmt: skip
def partly_used(self, x):
    asks = x[:, :1] > 0.6
    use = lambda: tf.where(asks, tf.sin(x * self.kernel), x)  # noqa: E731
    return tf.cond(tf.reduce_any(asks), use, lambda: x)


@own(on_features, SAME, "a weight's gradient by hand", kernel=(None, 5))
def custom_gradient_of_weight(self, x):
    @tf.custom_gradient
    def multiply(x, kernel):
        def gradient(upstream):
            of_kernel = tf.matmul(x, upstream, transpose_a=True)
            return tf.matmul(upstream, kernel, transpose_b=True), 2 * of_kernel

        return tf.matmul(x, kernel), gradient

    return multiply(x, tf.identity(self.kernel.value))


@own(on_images, SAME, "Python code, but nothing that towers change", under_fit="same, warned",
     then=lambda: [layers.Conv2D(3, 3)])  # fmt: skip
def numpy_by_example(_, images):
    """Finds edges by NumPy, an example at a time: TensorFlow does not see how."""
    edges = tf.numpy_function(
        lambda x: np.abs(np.diff(x, axis=2, append=0)), [images], images.dtype
    )
    return tf.ensure_shape(edges, images.shape)
