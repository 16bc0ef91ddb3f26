"""Models that TensorFlow's CPU kernels can compute, for --model=tests.gpu.models:text and so on.

On a GPU Keras takes cuDNN for an LSTM, which no kernel of the CPU stands in for.
"""

import keras
import tensorflow as tf
from keras import layers


def text():
    """Return tests.tasks' model of text, without cuDNN."""
    inner = layers.LSTM(5, dropout=0.2, use_cudnn=False)
    outer = layers.Dense(1, activation="sigmoid")
    words = keras.Input((7,), dtype="int32")
    model = keras.Sequential([words, layers.Embedding(20, 6, mask_zero=True), inner, outer])
    model.compile("rmsprop", "binary_crossentropy", metrics=["accuracy", keras.metrics.AUC()])
    return model


class Smallest(layers.Layer):
    """Adds each example's smallest feature, by an op that GPUs have no kernel for."""

    def call(self, x):
        """Return features as they came."""
        return x + tf.stop_gradient(tf.raw_ops.NthElement(input=x, n=0))[:, None]


def without_kernel(num_classes, image_shape):
    """Return a model with a layer that TensorFlow cannot compute on a GPU."""
    flat = [keras.Input(image_shape), layers.Flatten()]
    return keras.Sequential([*flat, Smallest(name="smallest"), layers.Dense(num_classes)])
