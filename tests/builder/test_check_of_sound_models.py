"""The check of towers beside one device accuses no sound model."""

import warnings

import keras
import numpy as np
import pytest
import tensorflow as tf

from towers import TowerBuilder

pytestmark = [pytest.mark.run, pytest.mark.checked]
ROWS = np.random.default_rng(0).normal(size=(16, 8))
L = keras.layers


def told(fn, *batch):
    """Return all that a user sees of a check."""
    lines = []
    builder = TowerBuilder(["/cpu:0", "/cpu:1"], on_warning=lines.append)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        lines += builder.check(fn, (), *map(tf.constant, batch))
    return lines + [str(each.message) for each in caught]


def of_layers(policy, *layers):
    """Return a built model of layers that are made under a policy."""
    before = keras.config.dtype_policy()
    keras.config.set_dtype_policy(policy)
    keras.utils.set_random_seed(3)
    try:
        model = keras.Sequential([make() for make in layers])
        model.build((None, *ROWS.shape[1:]))
        return model
    finally:
        keras.config.set_dtype_policy(before)


def test_a_gradient_that_normalisations_make_vanish_is_rounding():
    """One far example among zeros: each BatchNorm divides what goes back by its distance."""
    blocks = [lambda: L.Dense(4), L.BatchNormalization, L.ReLU] * 3
    model = of_layers("float64", *blocks, lambda: L.Dense(4))
    assert told(lambda x: model(x, training=True), ROWS) == []


def test_a_far_example_costs_moments_digits():
    """The second of two normalizations divides what the first has left of the others."""
    norm = of_layers("float64", L.BatchNormalization)
    assert told(lambda x: norm(norm(x * 1e-2, training=True), training=True), ROWS) == []


@pytest.mark.parametrize("policy", ["mixed_bfloat16", "mixed_float16"])
def test_sums_in_16_bits_may_be_rough(policy):
    """On a CPU the gradient of a bias in bfloat16 stops growing at 256 terms."""
    layers = [lambda: L.Reshape((8, 1)), lambda: L.UpSampling1D(32), lambda: L.Dense(4)]
    model = of_layers(policy, *layers, L.GlobalAveragePooling1D, L.UnitNormalization)
    assert told(lambda x: model(x, training=True), ROWS.astype("float32")) == []
    assert {layer.dtype_policy.name for layer in model.layers} == {policy}  # as before


class CastsItself(keras.layers.Layer):
    def call(self, x):
        return x * keras.ops.cast(keras.ops.exp(keras.ops.cast(x, "float32")), "bfloat16")


class AddsIn16Bits(keras.layers.Layer):
    def call(self, x):
        return tf.add(x, tf.ones_like(x, tf.bfloat16))  # of no other type than its own


@pytest.mark.parametrize("make", [CastsItself, AddsIn16Bits])
def test_layers_may_cast_to_16_bits_themselves(make):
    model = of_layers("mixed_bfloat16", lambda: L.Dense(4), make, lambda: L.Dense(2))
    assert told(lambda x: model(x, training=True), ROWS.astype("float32")) == []


def test_a_mixing_is_told_in_16_bits():
    mixing = lambda: L.Lambda(lambda x: x - keras.ops.mean(x, axis=0))  # noqa: E731
    model = of_layers("mixed_float16", lambda: L.Dense(4), mixing)
    (line,) = told(lambda x: model(x, training=True), ROWS.astype("float32"))
    assert line.startswith("inexact: layer ") and "lambda" in line


def test_the_message_says_why_a_layer_cannot_be_called():
    def refuse(x):
        raise ValueError("rows are too short")

    model = of_layers("float32", lambda: L.Dense(4))
    (line,) = told(lambda x: L.Lambda(refuse)(model(x)), ROWS)
    assert line.startswith("not checked: rows are too short")
