"""Models that towers cannot train, and say so in one line before the first step."""

import keras
import tensorflow as tf

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


def tensorflow_variable(num_classes, image_shape):
    return on_features(num_classes, image_shape, CountsInATensorFlowVariable())


class AveragesInATensorFlowVariable(layers.Layer):
    def build(self, shape):
        self.mean = tf.Variable(tf.zeros([shape[-1]], self.dtype), trainable=False)

    def call(self, x, training=False):
        if training:
            self.mean.assign(0.9 * self.mean + 0.1 * tf.reduce_mean(x, axis=0))
        return x - self.mean


def tensorflow_average(num_classes, image_shape):
    return on_features(num_classes, image_shape, AveragesInATensorFlowVariable())


class LayerInCall(layers.Layer):
    """Makes a new layer whenever it is called."""

    def call(self, x):
        return layers.Dense(5, activation="tanh")(x)


def layer_in_call(num_classes, image_shape):
    return on_features(num_classes, image_shape, LayerInCall())


class VariableInCall(layers.Layer):
    def call(self, x):
        return x * tf.Variable(lambda: tf.ones([x.shape[-1]], x.dtype))


def variable_in_call(num_classes, image_shape):
    return on_features(num_classes, image_shape, VariableInCall())


def two_inputs(num_classes, image_shape):
    images, others = keras.Input(image_shape), keras.Input((4,))
    x = layers.Concatenate()([layers.Flatten()(images), others])
    return keras.Model([images, others], layers.Dense(num_classes)(x))


def named_inputs(num_classes, image_shape):
    inputs = {"image": keras.Input(image_shape), "mask": keras.Input(image_shape)}
    x = layers.Flatten()(inputs["image"] * inputs["mask"])
    return keras.Model(inputs, layers.Dense(num_classes)(x))


def integer_logits(num_classes, image_shape):
    rounded = layers.Lambda(lambda x: ops.cast(ops.round(x * 100), "int32"), dtype="int32")
    return keras.Sequential(
        [keras.Input(image_shape), layers.Flatten(), layers.Dense(num_classes), rounded]
    )


def two_outputs(num_classes, image_shape):
    inputs = keras.Input(image_shape)
    x = layers.Flatten()(inputs)
    return keras.Model(inputs, [layers.Dense(num_classes)(x), layers.Dense(1)(x)])


def one_logit(num_classes, image_shape):
    return keras.Sequential([keras.Input(image_shape), layers.Flatten(), layers.Dense(1)])


def nothing_to_train(num_classes, image_shape):
    model = on_features(num_classes, image_shape)
    model.trainable = False
    return model


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


def batch_norm_in_cond(num_classes, image_shape):
    return on_maps(num_classes, image_shape, SometimesNorm())


def batch_norm_in_cond_of_features(num_classes, image_shape):
    return on_features(num_classes, image_shape, SometimesNorm(), layers.Dense(4))


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


def batch_norm_beside_cond(num_classes, image_shape):
    """Not refused: BatchNorm is outside of the branch."""
    return on_maps(num_classes, image_shape, layers.BatchNormalization(), Branch(), layers.ReLU())
