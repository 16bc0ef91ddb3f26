"""Two models of users' kind, and their data: text by an LSTM, and by a small transformer.

--model=tests.user_models:lstm --dataset=tests.user_models:text.
"""

import keras
import numpy as np
from keras import layers

WORDS, LENGTH, CLASSES = 50, 12, 3


def text():
    def make(size, seed):
        random = np.random.default_rng(seed)
        words = random.integers(1, WORDS, (size, LENGTH)).astype(np.int32)
        return words, random.integers(0, CLASSES, size).astype(np.int32)

    return make(64, 0), make(32, 1), CLASSES


def lstm(width=16):
    words = keras.Input((LENGTH,), dtype="int32")
    x = layers.LSTM(width)(layers.Embedding(WORDS, width)(words))
    return keras.Model(words, layers.Dense(CLASSES)(layers.Dropout(0.2)(x)))


def transformer(depth=2, width=16, length=LENGTH):
    words = keras.Input((length,), dtype="int32")
    x = layers.Embedding(WORDS, width)(words)
    for _ in range(depth):
        y = layers.LayerNormalization()(x)
        x = x + layers.Dropout(0.1)(layers.MultiHeadAttention(2, width // 2)(y, y))
        y = layers.Dense(4 * width, "gelu")(layers.LayerNormalization()(x))
        x = x + layers.Dropout(0.1)(layers.Dense(width)(y))
    x = layers.GlobalAveragePooling1D()(layers.LayerNormalization()(x))
    return keras.Model(words, layers.Dense(CLASSES)(x))
