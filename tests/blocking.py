"""A data set whose source blocks as long as a file is there: `train`, or `test`.

Not in the main thread: there the data set is looked at before it is read.
"""

import threading
import time
from pathlib import Path

import keras
import numpy as np

SIZE, STEPS = 64, 8  # of each part; of an epoch, with batches of 8
SECONDS = 0.2  # of a batch, so that a test can tell in time that the next ones are to block


def data():
    random = np.random.default_rng(0)
    x = random.normal(size=(SIZE, 6)).astype("float32")
    y = (x.sum(axis=1) > 0).astype("int32")
    return tuple(_batches(part, x, y) for part in ("train", "test"))


def net(num_classes):
    layers = [keras.layers.Dense(5, "tanh"), keras.layers.Dropout(0.3), keras.layers.Dense(2)]
    return keras.Sequential([keras.Input((6,)), *layers])


class _batches(keras.utils.PyDataset):
    """Batches of 8, in which the user's own code waits."""

    def __init__(self, part, x, y):
        super().__init__()
        self.part, self.x, self.y = Path(part), x, y

    def __len__(self):
        return STEPS

    def __getitem__(self, index):
        if threading.current_thread() is not threading.main_thread():
            time.sleep(SECONDS)
            while self.part.exists():
                time.sleep(0.02)
        rows = slice(8 * index, 8 * index + 8)
        return self.x[rows], self.y[rows]
