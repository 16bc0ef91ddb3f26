"""Normalisation: BatchNorm of every shape, and those that know one example alone."""

import keras
import tensorflow as tf

from tests.zoo.parts import on_features, on_maps, on_rows

layers = keras.layers


def batch_norm_ranks(num_classes, image_shape):
    inputs = keras.Input(image_shape)
    x = layers.BatchNormalization()(layers.Conv2D(4, 3, activation="tanh")(inputs))
    volumes = layers.BatchNormalization()(layers.Reshape((3, 2, 6, 4))(x))
    rows = layers.BatchNormalization()(layers.Reshape((9, 16))(volumes))
    features = layers.BatchNormalization()(layers.Dense(6)(layers.Flatten()(rows)))
    return keras.Model(inputs, layers.Dense(num_classes)(features))


def batch_norm_axes(num_classes, image_shape):
    return on_maps(
        num_classes,
        image_shape,
        layers.BatchNormalization(axis=1),
        layers.Conv2D(4, 3, padding="same", activation="relu"),
        layers.BatchNormalization(axis=2),
        layers.Conv2D(4, 3, activation="relu"),
        layers.BatchNormalization(axis=-1, center=False),
    )


def batch_norm_plain(num_classes, image_shape):
    return on_rows(
        num_classes,
        image_shape,
        layers.BatchNormalization(scale=False, center=False, momentum=0.5, epsilon=1e-2),
        layers.BatchNormalization(momentum=0.0, gamma_initializer="zeros"),
    )


class Padding(layers.Layer):
    """Masks the rows of pixels that are dark: not the same number in each example."""

    def compute_mask(self, x, mask=None):
        return keras.ops.mean(x, axis=-1) > -0.1

    def call(self, x):
        return x


def batch_norm_masked(num_classes, image_shape):
    inputs = keras.Input(image_shape)
    x = Padding()(layers.Reshape((image_shape[0], -1))(inputs))
    x = layers.BatchNormalization()(layers.Dense(4)(x))
    return keras.Model(inputs, layers.Dense(num_classes)(layers.GlobalAveragePooling1D()(x)))


def batch_norm_frozen(num_classes, image_shape):
    start = keras.initializers.Constant(0.25)
    return on_maps(
        num_classes,
        image_shape,
        layers.BatchNormalization(trainable=False, moving_mean_initializer=start),
        layers.Conv2D(3, 3, activation="tanh"),
    )


class Inference(layers.Layer):
    """Keeps its BatchNorm in inference whatever the model does."""

    def __init__(self):
        super().__init__()
        self.norm = layers.BatchNormalization()

    def call(self, x):
        return self.norm(x, training=False)


def batch_norm_in_inference(num_classes, image_shape):
    return on_maps(num_classes, image_shape, Inference(), layers.Conv2D(3, 3))


class Norm(layers.BatchNormalization):
    def call(self, x, training=None, mask=None):
        return tf.nn.relu(super().call(x, training=training, mask=mask))


def batch_norm_subclass(num_classes, image_shape):
    return on_maps(num_classes, image_shape, Norm(), layers.Conv2D(4, 3), Norm(momentum=0.9))


def batch_norm_twice(num_classes, image_shape):
    inputs = keras.Input(image_shape)
    norm, conv = layers.BatchNormalization(), layers.Conv2D(3, 3, padding="same")
    x = norm(conv(norm(conv(inputs))))
    return keras.Model(inputs, layers.Dense(num_classes)(layers.GlobalMaxPooling2D()(x)))


def batch_norm_synchronized(num_classes, image_shape):
    norm = layers.BatchNormalization(synchronized=True)
    return on_maps(num_classes, image_shape, norm, layers.ReLU())


def batch_norm_renorm(num_classes, image_shape):
    return on_maps(num_classes, image_shape, layers.BatchNormalization(renorm=True), layers.ReLU())


def batch_norm_float32(num_classes, image_shape):
    norm = layers.BatchNormalization(dtype="float32")
    return on_maps(num_classes, image_shape, norm, layers.ReLU())


def batch_norm_after_dropout(num_classes, image_shape):
    middle = (layers.Dropout(0.3), layers.BatchNormalization(), layers.ReLU())
    return on_features(num_classes, image_shape, *middle)


def by_example(num_classes, image_shape):
    return on_maps(
        num_classes,
        image_shape,
        layers.LayerNormalization(axis=[1, 2, 3]),
        layers.GroupNormalization(2),
        layers.Conv2D(4, 3, padding="same"),
        layers.UnitNormalization(),
        layers.RMSNormalization(),
        layers.GroupNormalization(-1),
    )


def spectral(num_classes, image_shape):
    return on_maps(
        num_classes,
        image_shape,
        layers.SpectralNormalization(layers.Conv2D(4, 3, activation="relu")),
        layers.SpectralNormalization(layers.Conv2D(4, 1), power_iterations=2),
    )


class InstanceNorm(layers.Layer):
    def build(self, shape):
        self.scale = self.add_weight(shape=(shape[-1],), initializer="ones", name="scale")

    def call(self, x):
        mean, variance = tf.nn.moments(x, axes=[1, 2], keepdims=True)
        return (x - mean) * tf.math.rsqrt(variance + 1e-3) * self.scale


class FilterResponseNorm(layers.Layer):
    def build(self, shape):
        size = {"shape": (shape[-1],)}
        self.gamma = self.add_weight(**size, initializer="ones", name="gamma")
        self.tau = self.add_weight(**size, initializer="zeros", name="tau")

    def call(self, x):
        squares = tf.reduce_mean(tf.square(x), axis=[1, 2], keepdims=True)
        return tf.maximum(x * tf.math.rsqrt(squares + 1e-3) * self.gamma, self.tau)


def by_hand(num_classes, image_shape):
    layer = layers.Conv2D(4, 3, padding="same")
    return on_maps(num_classes, image_shape, InstanceNorm(), layer, FilterResponseNorm())


def weight_normalised_head(num_classes, image_shape):
    norm = keras.constraints.UnitNorm()
    middle = (layers.Dense(5, kernel_constraint=norm), layers.UnitNormalization())
    return on_features(num_classes, image_shape, *middle)


def given_statistics(num_classes, image_shape):
    return keras.Sequential(
        [
            keras.Input(image_shape),
            layers.Normalization(mean=[0.1, 0.0, -0.1], variance=[1.0, 0.5, 2.0]),
            layers.Conv2D(3, 3, activation="relu"),
            layers.Flatten(),
            layers.Dense(num_classes),
        ]
    )
