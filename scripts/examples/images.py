"""An image classifier: convolutions, BatchNorm and dropout, trained over towers by `fit`.

python scripts/examples/images.py --num_towers=2
"""

import argparse

import keras
import numpy as np
from keras import layers

import towers


def data(size=2000, seed=0):
    """Return noisy images [N, 16, 16, 3] of a bright bar, and in which of 4 directions it goes."""
    random = np.random.default_rng(seed)
    labels = random.integers(0, 4, size)
    places = random.integers(-4, 5, (size, 1, 1))
    y, x = np.mgrid[-8:8, -8:8]
    across = np.stack([x, y, x + y, x - y])[labels] - places
    images = (np.abs(across) < 2)[..., None] + random.normal(0, 0.5, (size, 16, 16, 3))
    return {"x": images.astype("float32"), "y": labels}


def build():
    model = keras.Sequential(
        [
            keras.Input([16, 16, 3]),
            layers.Conv2D(8, 3, padding="same", use_bias=False),
            layers.BatchNormalization(),
            layers.ReLU(),
            layers.MaxPooling2D(),
            layers.Conv2D(16, 3, padding="same", activation="relu"),
            layers.GlobalAveragePooling2D(),
            layers.Dropout(0.2),
            layers.Dense(4, kernel_regularizer="l2"),
        ]
    )
    model.compile(
        optimizer=keras.optimizers.SGD(0.1, momentum=0.9, clipnorm=1.0),
        loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        metrics=["accuracy"],
    )
    return model


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--num_towers", type=int, default=2)
    devices = towers.devices.tower_devices(parser.parse_args().num_towers)  # before any tensor
    keras.utils.set_random_seed(0)
    model = towers.parallelize(build(), devices=devices)
    model.fit(**data(), batch_size=64, epochs=5, validation_split=0.1, verbose=2)


if __name__ == "__main__":
    main()
