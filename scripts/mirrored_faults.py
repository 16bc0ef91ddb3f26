"""Three faults of `MirroredStrategy`, beside one device and two towers, on the same numbers.

    python scripts/mirrored_faults.py

One step of `fit` each, on two logical CPU devices:

* the length of the update where gradients are clipped to the length 1 and the learning rate is 1;
* the weights after a step in which the examples of the second device give an infinite gradient,
  under a loss scale, whose purpose is to skip such a step;
* the variance that BatchNormalization saves of a batch whose halves are 0, 0 and 2, 2.
"""

from collections.abc import Callable

import numpy as np

import towers
from towers.cli import quiet_start
from towers.formatting import table

with quiet_start(level=3):
    import keras
    import tensorflow as tf

WAYS = ("one device", "2 towers", "MirroredStrategy")


def fitted(way: str, make: Callable[[], keras.Model], x: np.ndarray, y: np.ndarray) -> keras.Model:
    """Return the model after one step of `fit` on a batch."""
    keras.utils.set_random_seed(0)
    if way == "MirroredStrategy":
        with tf.distribute.MirroredStrategy(["/cpu:0", "/cpu:1"]).scope():
            model = make()
    else:
        model = make()
    if way == "2 towers":
        towers.parallelize(model, devices=["/cpu:0", "/cpu:1"])
    model.fit(x, y, batch_size=len(x), shuffle=False, verbose=0)
    return model


def linear(optimizer: keras.optimizers.Optimizer) -> keras.Model:
    """Return a compiled model of one weight for each of two inputs, all zero."""
    model = keras.Sequential([
        keras.Input((2,)), keras.layers.Dense(1, use_bias=False, kernel_initializer="zeros"),
    ])  # fmt: skip
    model.compile(optimizer, "mse")
    return model


def clipped(way: str) -> str:
    """Return the length of an update by clipped gradients that differ between the halves."""
    x = np.array([[10.0, 0.0], [0.0, 10.0]])
    make = lambda: linear(keras.optimizers.SGD(1.0, clipnorm=1.0))  # noqa: E731
    model = fitted(way, make, x, np.array([[10.0], [10.0]]))
    return f"{np.linalg.norm(model.get_weights()[0]):.4f}"


def infinite(way: str) -> str:
    """Return the weights after a step in which one half's gradient is infinite."""
    x = np.array([[1.0, 1.0], [np.inf, 1.0]])

    def make() -> keras.Model:
        inner = keras.optimizers.SGD(1.0)
        return linear(keras.optimizers.LossScaleOptimizer(inner, initial_scale=2.0))

    model = fitted(way, make, x, np.array([[1.0], [1.0]]))
    return " ".join(f"{weight:g}" for weight in model.get_weights()[0].ravel())


def saved_variance(way: str) -> str:
    """Return what BatchNorm saves of one batch."""
    x = np.array([[0.0], [0.0], [2.0], [2.0]])

    def make() -> keras.Model:
        model = keras.Sequential([keras.Input((1,)), keras.layers.BatchNormalization(momentum=0.0)])
        model.compile("sgd", "mse")
        return model

    model = fitted(way, make, x, np.zeros((4, 1)))
    return f"{float(model.layers[0].moving_variance.numpy()[0]):g}"


def main() -> None:
    """Print what each way gives."""
    towers.devices.tower_devices(2, "cpu")
    tf.get_logger().setLevel("ERROR")  # each step is a new function, on purpose
    measures = {
        "norm of the update with clipnorm=1": clipped,
        "weights after an infinite gradient": infinite,
        "moving variance after 0, 0, 2, 2": saved_variance,
    }
    rows = [(name, *map(measure, WAYS)) for name, measure in measures.items()]
    print("\n".join(table(["", *WAYS], rows)))


if __name__ == "__main__":
    main()
