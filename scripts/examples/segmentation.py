"""Segmentation: a small U-Net, a loss for each pixel, and weights that leave pixels out.

python scripts/examples/segmentation.py --num_towers=2
"""

import argparse

import keras
import numpy as np
from keras import layers

import towers


def data(size=500, seed=0):
    """Return noisy images [N, 16, 16, 1] of a disc, its pixels, and which of them are known."""
    random = np.random.default_rng(seed)
    center, radius = random.uniform(4, 12, (2, size, 1, 1)), random.uniform(2, 5, (size, 1, 1))
    y, x = np.mgrid[:16, :16]
    distance = np.hypot(x - center[0], y - center[1]) - radius
    inside = distance < 0
    images = inside[..., None] + random.normal(0, 0.5, (size, 16, 16, 1))
    known = np.abs(distance) > 0.5  # nobody can say where exactly the border is
    return {
        "x": images.astype("float32"),
        "y": inside.astype("int32"),
        "sample_weight": known.astype("float32"),
    }


def convolved(x, width):
    x = layers.Conv2D(width, 3, padding="same", use_bias=False)(x)
    return layers.ReLU()(layers.BatchNormalization()(x))


def build():
    images = keras.Input([16, 16, 1])
    fine = convolved(images, 8)
    coarse = convolved(layers.MaxPooling2D()(fine), 16)
    up = layers.Conv2DTranspose(8, 2, strides=2)(coarse)
    pixels = convolved(layers.Concatenate()([fine, up]), 8)
    model = keras.Model(images, layers.Conv2D(2, 1)(pixels))
    model.compile(
        optimizer=keras.optimizers.Adam(0.01),
        loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        weighted_metrics=["accuracy"],
    )
    return model


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--num_towers", type=int, default=2)
    devices = towers.devices.tower_devices(parser.parse_args().num_towers)  # before any tensor
    keras.utils.set_random_seed(0)
    model = towers.parallelize(build(), devices=devices)
    model.fit(**data(), batch_size=32, epochs=5, verbose=2)


if __name__ == "__main__":
    main()
