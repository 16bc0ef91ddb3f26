"""Two inputs and two outputs, each with a loss, a weight and metrics of its own.

python scripts/examples/two_outputs.py --num_towers=2
"""

import argparse

import keras
import numpy as np
from keras import layers

import towers


def data(size=2000, seed=0):
    """Return signals [N, 32] with what is known of them [N, 2], and their shape and frequency."""
    random = np.random.default_rng(seed)
    kind = random.integers(0, 2, size)
    frequency = random.uniform(1, 4, (size, 1))
    phase, loudness = random.uniform(0, 2 * np.pi, (size, 1)), random.uniform(0.5, 2, (size, 1))
    waves = np.sin(frequency * np.linspace(0, 2 * np.pi, 32) + phase)
    signals = loudness * np.where(kind[:, None], np.sign(waves), waves)
    return {
        "x": {"signal": signals, "known": np.concatenate([phase, loudness], axis=1)},
        "y": {"kind": kind, "frequency": frequency},
        "sample_weight": {"kind": np.ones(size), "frequency": loudness[:, 0]},
    }


def build():
    signal, known = keras.Input([32], name="signal"), keras.Input([2], name="known")
    x = layers.Reshape([32, 1])(signal)
    x = layers.Conv1D(16, 5, strides=2, activation="relu")(x)
    x = layers.Dropout(0.1)(layers.Flatten()(x))
    x = layers.Dense(32, activation="relu")(layers.Concatenate()([x, known]))
    kind = layers.Dense(2, activation="softmax", name="kind")(x)
    frequency = layers.Dense(1, name="frequency")(x)
    model = keras.Model([signal, known], {"kind": kind, "frequency": frequency})
    model.compile(
        optimizer="rmsprop",
        loss={"kind": "sparse_categorical_crossentropy", "frequency": "mse"},
        loss_weights={"kind": 1.0, "frequency": 0.2},
        metrics={"kind": ["accuracy"], "frequency": ["mae"]},
    )
    return model


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--num_towers", type=int, default=2)
    devices = towers.devices.tower_devices(parser.parse_args().num_towers)  # before any tensor
    keras.utils.set_random_seed(0)
    model = towers.parallelize(build(), devices=devices)
    model.fit(**data(), batch_size=64, epochs=5, verbose=2)


if __name__ == "__main__":
    main()
