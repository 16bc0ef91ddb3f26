"""What models of the zoo share: a small network around the layer that an entry is about.

The layer gets what its name says: `maps` [B, 6, 6, 4], `rows` [B, 8, 4], or `features` [B, 6].
"""

import keras

layers = keras.layers


def on_maps(num_classes, image_shape, *middle):
    """Convolution, the layers in question, pooling, a dense head."""
    return keras.Sequential(
        [
            keras.Input(image_shape),
            layers.Conv2D(4, 3, activation="tanh"),
            *middle,
            layers.GlobalAveragePooling2D(),
            layers.Dense(num_classes),
        ]
    )


def on_rows(num_classes, image_shape, *middle):
    """Rows of pixels as a sequence of vectors, the layers in question, a dense head."""
    return keras.Sequential(
        [
            keras.Input(image_shape),
            layers.Reshape((image_shape[0], -1)),
            layers.Dense(4, activation="tanh"),
            *middle,
            layers.Flatten(),
            layers.Dense(num_classes),
        ]
    )


def on_features(num_classes, image_shape, *middle):
    """A dense layer, the layers in question, another dense layer."""
    return keras.Sequential(
        [
            keras.Input(image_shape),
            layers.Flatten(),
            layers.Dense(6, activation="tanh"),
            *middle,
            layers.Dense(num_classes),
        ]
    )


class Seeded(layers.Layer):
    """A layer that draws from a generator of its own."""

    def __init__(self, **keywords):
        super().__init__(**keywords)
        self.seed = keras.random.SeedGenerator(1)
