"""A classifier of texts of unequal length: an embedding that masks padding, and an LSTM.

python scripts/examples/text.py --num_towers=2
"""

import argparse

import keras
import numpy as np
from keras import layers

import towers

NUM_WORDS, LENGTH = 50, 12  # word 0 is padding


def data(size=2000, seed=0):
    """Return texts [N, 12] of 3 to 12 words, and whether more words are below 25 than above."""
    random = np.random.default_rng(seed)
    words = random.integers(1, NUM_WORDS, (size, LENGTH))
    lengths = random.integers(3, LENGTH + 1, (size, 1))
    is_word = np.arange(LENGTH) < lengths
    more_below = np.sum(np.sign(NUM_WORDS // 2 - words) * is_word, axis=1) > 0
    return {"x": words * is_word, "y": more_below.astype("float32")}


def build():
    model = keras.Sequential(
        [
            keras.Input([LENGTH], dtype="int32"),
            layers.Embedding(NUM_WORDS, 8, mask_zero=True),
            layers.LSTM(8, dropout=0.1),
            layers.Dense(1, activation="sigmoid"),
        ]
    )
    model.compile(
        optimizer=keras.optimizers.Adam(0.01, global_clipnorm=1.0),
        loss="binary_crossentropy",
        metrics=["accuracy", keras.metrics.AUC(name="auc")],
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
