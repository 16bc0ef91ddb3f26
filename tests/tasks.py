"""Five kinds of tasks, as their users write them: compiled models, and data that go with them.

--model=tests.tasks:images --dataset=tests.tasks:images_data, and so on by the names in TASKS.
"""

import keras
import numpy as np
from keras import layers

TASKS = ("images", "text", "table", "masks", "two")
_SIZES = (46, 23)  # of training and test set


def _halves(make):
    """Return a function that returns what `make(random, size)` does for training and test set."""

    def data():
        return tuple(make(np.random.default_rng(seed), size) for seed, size in enumerate(_SIZES))

    data.__name__ = data.__qualname__ = make.__name__
    return data


# Images with one label each.


def images():
    model = keras.Sequential(
        [
            keras.Input((8, 8, 3)),
            layers.Rescaling(1 / 255),
            layers.Conv2D(4, 3, activation="relu"),
            layers.BatchNormalization(),
            layers.Dropout(0.3),
            layers.GlobalAveragePooling2D(),
            layers.Dense(3, activation="softmax"),
        ]
    )
    model.compile("adam", "sparse_categorical_crossentropy", metrics=["accuracy"])
    return model


@_halves
def images_data(random, size):
    x = random.integers(0, 256, (size, 8, 8, 3)).astype(np.uint8)
    return x, random.integers(0, 3, size)


# Text: tokens, with a mask.


def text():
    model = keras.Sequential(
        [
            keras.Input((7,), dtype="int32"),
            layers.Embedding(20, 6, mask_zero=True),
            layers.LSTM(5, dropout=0.2),
            layers.Dense(1, activation="sigmoid", kernel_regularizer="l2"),
        ]
    )
    rate = keras.optimizers.schedules.ExponentialDecay(0.01, 3, 0.9)
    metrics = [keras.metrics.BinaryAccuracy(name="right"), keras.metrics.AUC(name="auc")]
    model.compile(keras.optimizers.RMSprop(rate), "binary_crossentropy", metrics=metrics)
    return model


@_halves
def text_data(random, size):
    tokens = random.integers(1, 20, (size, 7))
    tokens[:, 5:] *= random.integers(0, 2, (size, 1))
    return tokens.astype(np.int32), random.integers(0, 2, size)


# A table, and a number to be told.


def table():
    inputs = keras.Input((4,))
    hidden = layers.Dense(6, "tanh", kernel_regularizer=keras.regularizers.L2(0.01))(inputs)
    model = keras.Model(inputs, layers.Dense(1)(layers.Dropout(0.2)(hidden)))
    model.compile(keras.optimizers.AdamW(0.01, clipnorm=0.5), "mse", metrics=["mae"])
    return model


@_halves
def table_data(random, size):
    x = random.normal(size=(size, 4))
    return x, x.sum(axis=1, keepdims=True)


# Segmentation: a mask of each image.


def masks():
    inputs = keras.Input((8, 8, 1))
    x = layers.Conv2D(4, 3, padding="same", activation="relu")(inputs)
    x = layers.BatchNormalization()(x)
    model = keras.Model(inputs, layers.Conv2D(1, 1, activation="sigmoid")(x))
    iou = keras.metrics.BinaryIoU(target_class_ids=[1], name="iou")
    model.compile("nadam", keras.losses.Dice(), metrics=[iou])
    return model


@_halves
def masks_data(random, size):
    x = random.random((size, 8, 8, 1))
    return x, (x > 0.5).astype(np.float32)


# Two inputs, two outputs, weights of examples.


def two():
    left, right = keras.Input((3,), name="left"), keras.Input((2,), name="right")
    x = layers.Dense(5, "relu")(layers.Concatenate()([left, right]))
    outputs = {"value": layers.Dense(1, name="value")(x), "kind": layers.Dense(3, name="kind")(x)}
    model = keras.Model({"left": left, "right": right}, outputs)
    losses = {"value": "mse", "kind": keras.losses.SparseCategoricalCrossentropy(from_logits=True)}
    model.compile(
        keras.optimizers.SGD(0.05, momentum=0.9, use_ema=True),
        losses,
        loss_weights={"value": 0.5, "kind": 1.0},
        metrics={"value": ["mae"], "kind": ["accuracy"]},
    )
    return model


@_halves
def two_data(random, size):
    x = {"left": random.normal(size=(size, 3)), "right": random.normal(size=(size, 2))}
    y = {"value": x["left"].sum(1, keepdims=True), "kind": random.integers(0, 3, (size, 1))}
    return x, y, {"value": random.random(size), "kind": random.random(size)}
