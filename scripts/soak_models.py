"""Small models and data of the runs that scripts/soak disturbs."""

import os
import time

import keras
import numpy as np
import tensorflow as tf

EXAMPLES, CLASSES = 96, 3
BLOCK = "SOAK_BLOCK"  # the variable that names a file: while it is there, pipelines give nothing


def net(num_classes, image_shape, dropout=0.0, batch_norm=False):
    """Return a classifier of small images; it has no kinks, which would magnify rounding."""
    layers = [keras.Input(image_shape), keras.layers.Conv2D(8, 3, activation="tanh")]
    layers += [keras.layers.BatchNormalization()] if batch_norm else []
    layers += [keras.layers.Flatten(), keras.layers.Dropout(dropout)]
    return keras.Sequential([*layers, keras.layers.Dense(num_classes)])


def compiled(num_classes, image_shape):
    """Return a compiled classifier, whose optimizer, loss and metrics are its own."""
    model = net(num_classes, image_shape, dropout=0.2)
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(keras.optimizers.Adam(0.003), loss, metrics=["accuracy"])
    return model


def images():
    """Return arrays."""
    return arrays(0), arrays(1), CLASSES


def pipeline():
    """Return a `tf.data.Dataset` that can be blocked in one of its ops."""
    train, test = (tf.data.Dataset.from_tensor_slices(arrays(seed)) for seed in (0, 1))

    def read(image, label):
        label = tf.numpy_function(when_free, [label], tf.int64, stateful=False)
        return image, tf.ensure_shape(label, [])

    return train.map(read), test, CLASSES


def generator():
    """Return a `tf.data.Dataset` of a Python generator that can be blocked."""
    test = tf.data.Dataset.from_tensor_slices(arrays(1))

    def examples():
        for image, label in zip(*arrays(0), strict=True):
            yield image, when_free(label)

    train = tf.data.Dataset.from_generator(examples, output_signature=test.element_spec)
    return (train, EXAMPLES), test, CLASSES


def arrays(seed):
    """Return images and labels that mean nothing."""
    random = np.random.default_rng(seed)
    pixels = random.integers(0, 256, (EXAMPLES, 8, 8, 3), np.uint8)
    return pixels, random.integers(0, CLASSES, EXAMPLES)


def when_free(label):
    """Return the label as soon as no file blocks it."""
    while os.path.exists(os.environ.get(BLOCK, "")):
        time.sleep(0.05)
    return label
