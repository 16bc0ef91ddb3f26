"""A model for tests that verify over workers: --model=tests.catalogue:cnn."""

import keras

layers = keras.layers


def cnn(num_classes, image_shape):
    """Convolution, pooling and two kinds of dropout."""
    middle = [
        layers.Conv2D(4, 3, activation="relu"),
        layers.MaxPooling2D(),
        layers.SpatialDropout2D(0.3, seed=1),
        layers.Flatten(),
        layers.Dense(5, activation="tanh"),
        layers.Dropout(0.3, seed=2),
    ]
    return keras.Sequential([keras.Input(image_shape), *middle, layers.Dense(num_classes)])
