"""Models that towers cannot train, and say so in one line before the first step."""

import keras
import tensorflow as tf

from tests.zoo.entry import REFUSED, entry
from tests.zoo.parts import kept, on_features, on_maps, own

layers, ops = keras.layers, keras.ops


def _norm():
    return layers.BatchNormalization()


@own(on_features, REFUSED, "a tf.Variable is assigned in each tower", quick=True,
     calls=lambda: tf.Variable(0, trainable=False))  # fmt: skip
def tensorflow_variable(self, x, training):
    if training:
        self.calls.assign_add(1)
    return x


@own(on_features, REFUSED, "weights that are new in each call")
def layer_in_call(_, x):
    return layers.Dense(5, activation="tanh")(x)


@own(on_maps, REFUSED, "towers cannot meet in a branch", quick=True, norm=_norm, threshold=kept())
def batch_norm_in_cond(self, x, training):
    normalised = lambda: self.norm(x, training=training)  # noqa: E731
    return ops.cond(self.threshold < 1, normalised, lambda: ops.tanh(x))


@entry(REFUSED, "one batch of images is all there is")
def two_inputs(num_classes, image_shape):
    images, others = keras.Input(image_shape), keras.Input((4,))
    x = layers.Concatenate()([layers.Flatten()(images), others])
    return keras.Model([images, others], layers.Dense(num_classes)(x))


@entry(REFUSED, "logits alone are needed")
def two_outputs(num_classes, image_shape):
    images = keras.Input(image_shape)
    x = layers.Flatten()(images)
    return keras.Model(images, [layers.Dense(num_classes)(x), layers.Dense(1)(x)])


@entry(REFUSED, "no trainable weights")
def nothing_to_train(num_classes, image_shape):
    model = keras.Sequential(
        [keras.Input(image_shape), layers.Flatten(), layers.Dense(num_classes)]
    )
    model.trainable = False
    return model
