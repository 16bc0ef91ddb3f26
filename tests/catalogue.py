"""Models of every kind that towers train, small enough to be compared with one device in float64.

Those that `--model` can name, tests.catalogue:cnn, take images and give logits.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import keras
import numpy as np
import tensorflow as tf

from models.resnet import resnet as any_resnet
from tests import tiny

layers = keras.layers
NUM_TOKENS = 12


class Tokens(layers.Layer):
    """Turns pixels into token numbers, few enough that a batch has each of them many times."""

    def call(self, inputs):
        return tf.minimum(tf.cast(tf.abs(inputs[:, :2, :3, 0]) * 3, tf.int32), NUM_TOKENS - 1)


class Unused(layers.Layer):
    """Has a variable that the loss does not depend on."""

    def build(self, shape):
        self.kernel = self.add_weight(shape=(2, 2), initializer="ones", name="kernel")

    def call(self, inputs):
        return inputs


class Sometimes(layers.Layer):
    """Uses its kernel only where an example of the slice asks for it."""

    def build(self, shape):
        self.kernel = self.add_weight(shape=(shape[-1],), initializer="ones", name="kernel")

    def call(self, inputs):
        asks = inputs[:, :1] > 1.2
        use = lambda: tf.where(asks, tf.sin(inputs * self.kernel), inputs)  # noqa: E731
        return tf.cond(tf.reduce_any(asks), use, lambda: inputs)


def sequential(image_shape, *rest):
    return keras.Sequential([keras.Input(image_shape), *rest])


def cnn(num_classes, image_shape):
    """Convolution, pooling and two kinds of dropout."""
    return sequential(
        image_shape,
        layers.Conv2D(4, 3, activation="relu"),
        layers.MaxPooling2D(),
        layers.SpatialDropout2D(0.3, seed=1),
        layers.Flatten(),
        layers.Dense(5, activation="tanh"),
        layers.Dropout(0.3, seed=2),
        layers.Dense(num_classes),
    )


def resnet(num_classes, image_shape):
    return any_resnet(8, 2, num_classes=num_classes, image_shape=image_shape)


def embedding(num_classes, image_shape):
    """Sparse gradients."""
    return sequential(
        image_shape,
        Tokens(),
        layers.Embedding(NUM_TOKENS, 3),
        layers.Flatten(),
        layers.Dense(num_classes),
    )


def lstm(num_classes, image_shape):
    """Rows of pixels as a sequence, with dropout of inputs and of states."""
    return sequential(
        image_shape,
        layers.Reshape((8, -1)),
        layers.LSTM(3, dropout=0.3, recurrent_dropout=0.3, seed=1),
        layers.Dense(num_classes),
    )


def transformer(num_classes, image_shape):
    """A block of attention, with dropout of its weights, too."""
    inputs = keras.Input(image_shape)
    x = layers.Reshape((8, -1))(inputs)
    x = layers.Dense(4)(x)
    y = layers.LayerNormalization()(x)
    y = layers.MultiHeadAttention(2, 3, dropout=0.3, seed=1)(y, y)
    x = x + layers.Dropout(0.2, seed=2)(y)
    y = layers.Dense(8, activation="gelu")(layers.LayerNormalization()(x))
    x = x + layers.Dropout(0.2, seed=3)(layers.Dense(4)(y))
    return keras.Model(inputs, layers.Dense(num_classes)(layers.GlobalAveragePooling1D()(x)))


def frozen(num_classes, image_shape):
    """A frozen convolution and BatchNorm, whose statistics stay, before one that learns."""
    return sequential(
        image_shape,
        layers.Conv2D(3, 3, trainable=False),
        layers.BatchNormalization(
            trainable=False, moving_mean_initializer=keras.initializers.Constant(0.25)
        ),
        layers.Conv2D(3, 3, activation="tanh"),
        layers.BatchNormalization(momentum=0.5),
        layers.Flatten(),
        layers.Dense(num_classes),
    )


def partly_used(num_classes, image_shape):
    """One variable that only some towers use, and one that none uses."""
    return sequential(
        image_shape,
        layers.Flatten(),
        Sometimes(),
        Unused(),
        layers.Dense(num_classes),
    )


# ------------------------------------------------------------------------- With a loss of their own


class Case(NamedTuple):
    """A loss, from images and labels of a slice to losses [b], and what it depends on."""

    loss_fn: Callable
    variables: list[Any]
    state: list[Any]  # what it assigns


def cross_entropy(labels, logits):
    return tf.nn.sparse_softmax_cross_entropy_with_logits(labels, logits)


def classifier(make):
    """Return a function that makes the case of a model that gives logits."""

    def case():
        model = make(tiny.NUM_CLASSES, tiny.IMAGE_SHAPE)
        return Case(
            lambda images, labels: cross_entropy(labels, model(images, training=True)),
            model.trainable_variables,
            model.non_trainable_variables,
        )

    return case


def two_outputs():
    """A layer that is used twice, and a loss of two outputs."""
    inputs = keras.Input(tiny.IMAGE_SHAPE)
    x = layers.Dense(4, activation="tanh")(layers.Flatten()(inputs))
    shared = layers.Dense(4, activation="tanh")
    logits = layers.Dense(tiny.NUM_CLASSES)(shared(shared(x)))
    model = keras.Model(inputs, {"logits": logits, "size": layers.Dense(1)(shared(x))})

    def loss_fn(images, labels):
        outputs = model(images, training=True)
        error = outputs["size"][:, 0] - tf.reduce_sum(images, [1, 2, 3]) / 10
        return cross_entropy(labels, outputs["logits"]) + tf.abs(error)

    return Case(loss_fn, model.trainable_variables, model.non_trainable_variables)


class Module(tf.Module):
    """Two matrices, and dropout by TensorFlow's own function."""

    def __init__(self):
        super().__init__()
        random = np.random.default_rng(0)
        self.inner = tf.Variable(random.normal(size=(192, 4)) / 10)
        self.outer = tf.Variable(random.normal(size=(4, tiny.NUM_CLASSES)))

    def __call__(self, images):
        x = tf.tanh(tf.reshape(images, [-1, 192]) @ self.inner)
        return tf.nn.experimental.stateless_dropout(x, 0.3, seed=[1, 2]) @ self.outer


def module():
    net = Module()
    return Case(
        lambda images, labels: cross_entropy(labels, net(images)), list(net.trainable_variables), []
    )


CASES = {
    make.__name__: classifier(make)
    for make in (cnn, resnet, embedding, lstm, transformer, frozen, partly_used)
} | {make.__name__: make for make in (two_outputs, module)}
