"""`fit` on one device beside `fit` over towers: what a user can read of both, in float64."""

import contextlib

import keras
import numpy as np

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


def fit(build, data, num_towers=0, *, epochs=3, batch_size=8, **options):
    """Train a new model and return what can be read of it: {part: [(name, array)]}.

    Args:
        build: returns a compiled model.
        data: the arguments of fit.
        num_towers: 0 for plain Keras on one device.
        epochs: to train.
        batch_size: of training and of predicting.
        **options: of parallelize.
    """
    with in_float64():
        keras.utils.set_random_seed(0)
        model = build()
        if num_towers:
            devices = [f"/cpu:{i}" for i in range(num_towers)]
            towers.parallelize(model, devices=devices, **options)
        validation = {} if "validation_data" in data else {"validation_split": 0.2}
        history = model.fit(**data, **validation, batch_size=batch_size, epochs=epochs, verbose=0)
        predictions = model.predict(data["x"], batch_size=batch_size, verbose=0)
        outputs = keras.tree.flatten(predictions)
        figures = {name: np.asarray(values) for name, values in history.history.items()}
        variables = model.trainable_variables + model.non_trainable_variables  # seeds, too
        return {
            "losses": [(name, figures[name]) for name in figures if name.endswith("loss")],
            "metrics": [(name, figures[name]) for name in figures if not name.endswith("loss")],
            "weights": [(v.name, v.numpy()) for v in variables],
            "optimizer": [(v.name, v.numpy()) for v in model.optimizer.variables],
            "predictions": [(f"output {i}", x) for i, x in enumerate(outputs)],
        }


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
