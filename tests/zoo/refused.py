"""Models that towers cannot train, and say so in one line before the first step."""

import keras
import tensorflow as tf

from tests.zoo.entry import REFUSED, SAME, entry
from tests.zoo.parts import on_features, on_maps

layers, ops = keras.layers, keras.ops


class CountsInATensorFlowVariable(layers.Layer):
    def __init__(self):
        super().__init__()
        self.calls = tf.Variable(0, trainable=False)

    def call(self, x, training=False):
        if training:
            self.calls.assign_add(1)
        return x


class LayerInCall(layers.Layer):
    """Makes a new layer whenever it is called."""

    def call(self, x):
        return layers.Dense(5, activation="tanh")(x)


class SometimesNorm(layers.Layer):
    """Normalises in a branch."""

    def __init__(self):
        super().__init__()
        self.norm = layers.BatchNormalization()

    def build(self, shape):
        self.norm.build(shape)
        self.threshold = self.add_weight(
            shape=(), initializer="zeros", trainable=False, name="threshold"
        )

    def call(self, x, training=False):
        return ops.cond(
            self.threshold < 1, lambda: self.norm(x, training=training), lambda: ops.tanh(x)
        )


class Branch(layers.Layer):
    """A branch with a convolution in it."""

    def __init__(self):
        super().__init__()
        self.conv = layers.Conv2D(4, 1)

    def build(self, shape):
        self.conv.build(shape)
        self.threshold = self.add_weight(
            shape=(), initializer="zeros", trainable=False, name="threshold"
        )

    def call(self, x):
        return ops.cond(self.threshold < 1, lambda: self.conv(x), lambda: ops.tanh(x))


tensorflow_variable = on_features(
    REFUSED, "a tf.Variable is assigned in each tower", CountsInATensorFlowVariable, quick=True
)
layer_in_call = on_features(REFUSED, "weights that are new in each call", LayerInCall)
batch_norm_in_cond = on_maps(REFUSED, "towers cannot meet in a branch", SometimesNorm, quick=True)
batch_norm_beside_cond = on_maps(
    SAME,
    "the branch has no BatchNorm in it",
    lambda: [layers.BatchNormalization(), Branch(), layers.ReLU()],
)


@entry(REFUSED, "one batch of images is all there is", quick=True)
def two_inputs(num_classes, image_shape):
    images, others = keras.Input(image_shape), keras.Input((4,))
    x = layers.Concatenate()([layers.Flatten()(images), others])
    return keras.Model([images, others], layers.Dense(num_classes)(x))


@entry(REFUSED, "without gradient")
def integer_logits(num_classes, image_shape):
    rounded = layers.Lambda(lambda x: ops.cast(ops.round(x * 100), "int32"), dtype="int32")
    return keras.Sequential(
        [keras.Input(image_shape), layers.Flatten(), layers.Dense(num_classes), rounded]
    )


@entry(REFUSED, "logits alone are needed")
def two_outputs(num_classes, image_shape):
    images = keras.Input(image_shape)
    x = layers.Flatten()(images)
    return keras.Model(images, [layers.Dense(num_classes)(x), layers.Dense(1)(x)])


@entry(REFUSED, "as many logits as classes are needed")
def one_logit(num_classes, image_shape):
    return keras.Sequential([keras.Input(image_shape), layers.Flatten(), layers.Dense(1)])


@entry(REFUSED, "no trainable weights")
def nothing_to_train(num_classes, image_shape):
    model = keras.Sequential(
        [keras.Input(image_shape), layers.Flatten(), layers.Dense(num_classes)]
    )
    model.trainable = False
    return model
