"""Convolutions and pooling of all kinds."""

import keras
import tensorflow as tf

from tests.zoo.entry import SAME, entry
from tests.zoo.parts import of_images, on_images, on_maps, own

layers = keras.layers

first_cnn = on_images(
    SAME,
    "biases before BatchNorm: their gradients are zero in theory",
    lambda: [
        layers.Conv2D(4, 3, padding="same"),
        layers.BatchNormalization(),
        layers.ReLU(),
        layers.MaxPooling2D(),
        layers.Conv2D(6, 3, padding="same"),
        layers.BatchNormalization(),
        layers.Activation("relu"),
        layers.Dropout(0.5),
    ],
)


@of_images(SAME, "strides, transposed convolution, a skip")
def u_net(images):
    down = layers.Conv2D(4, 3, padding="same", activation="relu")(images)
    x = layers.Conv2D(6, 3, strides=2, padding="same", activation="relu")(down)
    x = layers.Conv2DTranspose(4, 3, strides=2, padding="same")(x)
    x = layers.LeakyReLU(0.1)(layers.Concatenate()([x, down]))
    return layers.GlobalAveragePooling2D()(layers.Conv2D(3, 1)(x))


@of_images(SAME, "concatenation, BatchNorm before each convolution")
def dense_block(images):
    x = images
    for _ in range(3):
        y = layers.Activation("relu")(layers.BatchNormalization(epsilon=1.001e-5)(x))
        x = layers.Concatenate()([x, layers.Conv2D(2, 3, padding="same", use_bias=False)(y)])
    return layers.GlobalAveragePooling2D()(x)


entry("local BatchNorm", "moments of a half", "--accumulate_steps=2")(dense_block)


@own(on_maps, SAME, "TensorFlow's own ops on a Keras weight", kernel=(3, 3, None, 4))
def by_tensorflow(self, x):
    """Convolution, patches and pooling by TensorFlow's own functions."""
    x = tf.nn.conv2d(x, self.kernel, strides=1, padding="SAME")
    x = tf.nn.max_pool2d(x, 2, 2, "SAME")
    patches = tf.image.extract_patches(x, [1, 2, 2, 1], [1, 1, 1, 1], [1, 1, 1, 1], "VALID")
    return tf.nn.depth_to_space(patches, 2)
