"""Values that a function treats otherwise than others: it is tried with them, too."""

import keras
import numpy as np
import pytest
import tensorflow as tf

from tests import fits
from towers import TowerBuilder

pytestmark = pytest.mark.run
RANDOM = np.random.default_rng(0)
ops = keras.ops


class Layer(keras.layers.Layer):
    def __init__(self, fn):
        super().__init__(name="suspect")
        self.fn = fn
        self.table = self.add_weight(shape=(50, 3), name="table")
        self.mean = self.add_weight(shape=(), name="mean", trainable=False, initializer="ones")

    def call(self, x):
        return self.fn(self, x)


def shares(mask):
    """Divide by how many numbers of the batch are not masked."""
    return lambda layer, x: x * ops.cast(mask(x), x.dtype) / ops.sum(ops.cast(mask(x), x.dtype))


def embedded_shares(masked):
    def fn(layer, x):
        mask = ops.cast(ops.not_equal(x, masked), layer.table.dtype)[..., None]
        return ops.take(layer.table, ops.maximum(x, 0), axis=0) * mask / (1 + ops.sum(mask))

    return fn


def filled(is_nan):
    def fn(layer, x):
        known = tf.where(is_nan(x), tf.zeros_like(x), x)
        return tf.where(is_nan(x), tf.reduce_mean(known, axis=0)[None] + 0 * known, known)

    return fn


def rarely(condition):
    return lambda layer, x: tf.cond(tf.reduce_any(condition(x)), lambda: x * 2, lambda: x + 1)


def in_a_branch(layer, x):
    def shrunk():
        return tf.cond(tf.reduce_any(x < -77), lambda: x / tf.reduce_max(x), lambda: x)

    return tf.cond(tf.reduce_any(x > -1e9), shrunk, lambda: x)


def drawing(fn, draw=keras.random.uniform):
    seed = keras.random.SeedGenerator(3)
    return lambda layer, x: fn(x, draw(ops.shape(x), seed=seed, dtype=x.dtype))


def kept_share(x, drawn):
    """Scales what is left of the whole batch, as DropBlock does."""
    mask = ops.cast(drawn > 0.3, x.dtype)
    return x * mask * ops.cast(ops.size(mask), x.dtype) / (1 + ops.sum(mask))


FLOATS, TOKENS = tf.TensorSpec([7, 4], tf.float64), tf.TensorSpec([7, 4], tf.int32)
MIXING = {
    "a mark": (FLOATS, shares(lambda x: x != -9)),
    "zeros": (FLOATS, shares(lambda x: ops.not_equal(x, 0))),
    "token 30": (TOKENS, embedded_shares(30)),
    "NaN, by itself": (FLOATS, filled(lambda x: x != x)),
    "large": (FLOATS, rarely(lambda x: x > 40)),
    "in a branch": (FLOATS, in_a_branch),
    "the share of a drawn mask": (FLOATS, drawing(kept_share)),
    "the largest number drawn": (FLOATS, drawing(lambda x, drawn: x * (drawn < ops.max(drawn)))),
    "an order that is drawn": (
        FLOATS,
        drawing(
            lambda x, drawn: ops.take(x, ops.argsort(drawn[:, 0]), axis=0), keras.random.normal
        ),
    ),
}
INNOCENT = {
    "a mark": (FLOATS, lambda layer, x: ops.where(x == -9, 0.0, x)),
    "token 30": (TOKENS, lambda layer, x: ops.take(layer.table, ops.where(x == 30, 1, x), axis=0)),
    "NaN": (FLOATS, lambda layer, x: tf.where(tf.math.is_nan(x), tf.zeros_like(x), x)),
    "noise without its own mean": (
        FLOATS,
        drawing(
            lambda x, drawn: x + drawn - ops.mean(drawn, 1, keepdims=True), keras.random.normal
        ),
    ),
}


def told(spec, fn):
    lines = []
    towers = TowerBuilder(["/cpu:0", "/cpu:1"], on_warning=lines.append)
    layer = Layer(fn)
    step = tf.function(lambda x: towers.concat(layer, x), autograph=False)
    step.get_concrete_function(spec)
    return lines


@pytest.mark.parametrize("name", MIXING)
def test_examples_that_see_each_other_by_rare_values_or_by_draws_are_seen(name, float64):
    assert [line for line in told(*MIXING[name]) if line.startswith("mixed examples")]


@pytest.mark.parametrize("name", INNOCENT)
def test_nothing_is_said_of_values_that_are_treated_by_themselves(name, float64):
    assert told(*INNOCENT[name]) == []


# Only real values, whole numbers of a hundred and more, are treated otherwise.
REAL = {
    "whole numbers": lambda x: ops.where(ops.floor(x) == x, x / ops.max(ops.floor(x)), x),
    "large": lambda x: tf.cond(
        tf.reduce_all(tf.abs(x) < 90), lambda: x, lambda: x - tf.reduce_mean(x**2)
    ),
    "logarithms": lambda x: ops.where(ops.log(x) > 4.6, x - ops.mean(ops.log(x)), x),
}


def of_numbers_of_the_batch(model, x, y):
    return model.compute_loss(x, y, model.part(x * 2 - tf.reduce_min(x)))


@pytest.mark.parametrize(
    "name, own_step", [*((name, False) for name in REAL), ("whole numbers", True)]
)
def test_fit_tries_a_real_batch(name, own_step):
    data = {"x": RANDOM.integers(100, 200, size=(14, 4)).astype(float), "y": np.ones((14, 4))}

    def part():
        return Layer(lambda layer, x: REAL[name](x) * layer.table[0, 0])

    def build():
        if own_step:
            return fits.of_step(of_numbers_of_the_batch, part=part)
        model = keras.Sequential([keras.Input((4,)), part()])
        model.compile("sgd", "mse")
        return model

    with pytest.warns(UserWarning, match="mixed examples: layer .*suspect"):
        fits.fit(build, data | {"batch_size": 7}, 2, epochs=1)


def test_no_batch_is_lost_or_seen_twice():
    data = {"x": RANDOM.normal(size=(40, 3)), "y": RANDOM.normal(size=(40, 1)), "batch_size": 7}

    def build():
        model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(1)])
        model.compile("sgd", "mse", steps_per_execution=3, metrics=["mae"])
        return model

    assert not fits.differences(fits.fit(build, data), fits.fit(build, data, 2))
