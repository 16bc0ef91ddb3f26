"""`fit` on one device beside `fit` over towers: what a user can read of both, in float64."""

import contextlib
import warnings
from pathlib import Path

import keras
import numpy as np
import tensorflow as tf

import towers

PARTS = ("losses", "metrics", "weights", "optimizer", "predictions")


@contextlib.contextmanager
def in_float64():
    """Let losses and metrics, too, be computed in float64, and data not be rounded to float32."""
    before = keras.config.floatx(), keras.config.dtype_policy()
    keras.config.set_floatx("float64")
    keras.config.set_dtype_policy("float64")
    try:
        yield
    finally:
        keras.config.set_floatx(before[0])
        keras.config.set_dtype_policy(before[1])


def fit(build, given, num_towers=0, *, epochs=2, plain_first=False, devices="", **options):
    """Train a new model and return what can be read of it: {part: [(name, array)]}.

    Args:
        build: returns a compiled model.
        given: the arguments of fit; a model that is validated is asked for predictions, too.
        num_towers: 0 for plain Keras on one device.
        epochs: to train.
        plain_first: one epoch before them is of plain Keras.
        devices: of the towers, in place of the first CPUs.
        **options: of parallelize.
    """
    with in_float64():
        keras.utils.set_random_seed(0)
        model = build()
        if plain_first:
            model.fit(**given, verbose=0)
        if devices := devices or [f"/cpu:{i}" for i in range(num_towers)]:
            towers.parallelize(model, devices=devices, **options)
        history = model.fit(**given, epochs=epochs, verbose=0).history
        figures = {name: np.asarray(values) for name, values in history.items()}
        variables = model.trainable_variables + model.non_trainable_variables  # seeds, too
        outputs = []
        if {"validation_split", "validation_data"} & given.keys():
            size = given.get("batch_size")
            outputs = keras.tree.flatten(model.predict(given["x"], batch_size=size, verbose=0))
        return {
            "losses": [(name, figures[name]) for name in figures if name.endswith("loss")],
            "metrics": [(name, figures[name]) for name in figures if not name.endswith("loss")],
            "weights": [(v.name, v.numpy()) for v in variables],
            "optimizer": [(v.name, v.numpy()) for v in model.optimizer.variables],
            "predictions": [(f"output {i}", x) for i, x in enumerate(outputs)],
        }


def compare(build, given, num_towers=3, **options):
    """Return what differs from plain Keras, and the lines that towers alone say.

    Args:
        build: as for `fit`.
        given: returns the arguments of fit.
        num_towers: the towers beside one device.
        **options: of both, and of parallelize.
    """
    epochs = {"epochs": options.pop("epochs", 1)}
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        expected = fit(build, given(), **epochs)
        found = fit(build, given(), num_towers, **epochs, **options)
    package = str(Path(towers.__file__).parent)
    lines = [str(one.message) for one in told if one.filename.startswith(package)]
    return differences(expected, found), lines


def of_step(step, optimizer="sgd", **parts):
    """Return a model that has these parts, and whose loss `step(model, x, y)` is."""

    class Model(keras.Model):
        def __init__(self):
            super().__init__()
            for name, make in parts.items():
                setattr(self, name, make())

        def call(self, x):
            return x

        def train_step(self, data):
            with tf.GradientTape() as tape:
                loss = step(self, *data)
            weights = self.trainable_variables
            self.optimizer.apply(tape.gradient(loss, weights), weights)
            return {"loss": loss}

    model = Model()
    model.compile(optimizer, "mse")
    return model


def layer_of(call, **parts):
    """Return a layer that has these parts, and calls `call(layer, ...)`."""

    class Layer(keras.layers.Layer):
        def __init__(self):
            super().__init__()
            for name, make in parts.items():
                setattr(self, name, make())

        def call(self, *args, **kwargs):
            return call(self, *args, **kwargs)

    return Layer()


def differences(one, other, tolerance=1e-9):
    """Return {part: "name: relative difference"} of the first that differs in each part."""
    found = {}
    for part in PARTS:
        for (name, x), (_, y) in zip(one[part], other[part], strict=True):
            difference = relative_difference(x, y)
            if not difference <= tolerance:  # nor if it is none
                found.setdefault(part, f"{name}: {difference:.1e}")
    return found


def relative_difference(x, y):
    """Return the largest difference of two arrays, as a part of the largest number."""
    x, y = np.asarray(x, np.float64), np.asarray(y, np.float64)
    assert x.shape == y.shape
    if not x.size or np.array_equal(x, y):
        return 0.0
    return np.max(np.abs(x - y)) / np.max(np.abs([x, y]))
