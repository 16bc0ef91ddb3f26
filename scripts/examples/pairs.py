"""Contrastive pairs: a loss in which each example of the batch is compared with all others.

    python scripts/examples/pairs.py --num_towers=2

The towers compute the embeddings; the loss is made of those of the whole batch, so that it is the
same at any number of towers.
"""

import argparse

import keras
import numpy as np
from keras import layers, ops

import towers


def data(size=2000, seed=0):
    """Return pairs of views [N, 2, 16] of one of 50 things, and the number of the thing."""
    random = np.random.default_rng(seed)
    things = random.integers(0, 50, size)
    views = random.normal(0, 1, (50, 1, 16))[things] + random.normal(0, 0.7, (size, 2, 16))
    return {"x": views.astype("float32"), "y": things}


def similarities(embeddings):
    """Return how like each first view [B, D] is to each second view: [B, B]."""
    first, second = embeddings[:, 0], embeddings[:, 1]
    return ops.matmul(first, ops.transpose(second)) / 0.1


def is_same(things):
    things = ops.reshape(things, [-1, 1])
    return ops.equal(things, ops.transpose(things))


def contrastive(things, embeddings):
    """Return for each first view the cross entropy of finding a second view of its thing: [B]."""
    logits = similarities(embeddings)
    same = ops.cast(is_same(things), logits.dtype)
    wanted = same / ops.sum(same, axis=1, keepdims=True)
    return ops.categorical_crossentropy(wanted, logits, from_logits=True)


def found(things, embeddings):
    """Return for each first view whether the second view most like it shows its thing: [B]."""
    nearest = ops.argmax(similarities(embeddings), axis=1)
    things = ops.reshape(things, [-1])
    return ops.equal(ops.take(things, nearest), things)


def build():
    model = keras.Sequential(
        [
            keras.Input([2, 16]),
            layers.Dense(32, activation="relu"),
            layers.BatchNormalization(),
            layers.Dense(8),
            layers.UnitNormalization(),
        ]
    )
    model.compile(optimizer=keras.optimizers.Adam(0.01), loss=contrastive, metrics=[found])
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
