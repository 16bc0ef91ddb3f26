"""Models with variables whose gradient is their new value, as in float8, run on one device."""

import keras
import numpy as np
import pytest
import tensorflow as tf

from tests import fits, tiny
from towers import TowerBuilder
from towers.errors import InputError
from towers.training.run.setup import prepare

pytestmark = pytest.mark.run
X = np.random.default_rng(0).normal(size=(7, 4)).astype(np.float32)


def float8():
    model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1)])
    model.layers[0].quantize("float8")
    model.compile("sgd", "mse")
    return model


def float8_classifier(num_classes, image_shape):
    model = tiny.dense(num_classes, image_shape)
    model.layers[-1].quantize("float8")
    return model


def test_fit_runs_on_one_device_and_says_so():
    given = {"x": X, "y": X[:, :1] ** 2, "batch_size": 4, "shuffle": False}
    with pytest.warns(UserWarning, match="runs on one device: the gradient of .* is its new value"):
        found = fits.fit(float8, given, 2)
    assert not fits.differences(found, fits.fit(float8, given))


def test_a_builder_refuses_them():
    model, builder = float8(), TowerBuilder(["/cpu:0", "/cpu:1"])
    for way in builder.concat, lambda fn, x: builder.gradients(fn, model.trainable_variables, x):
        with pytest.raises(InputError, match="is its new value.*compile the model"):
            tf.function(way, autograph=False)(lambda x: model(x)[:, 0], tf.constant(X))


def test_a_run_of_a_compiled_model_is_on_one_device():
    given = dict(model="tests.builder.test_new_values:float8_classifier", metrics="accuracy")
    found, expected = (tiny.Loop(tiny.options("x", **given, num_towers=n)) for n in (2, 1))
    assert found(2)["loss"] == pytest.approx(expected(2)["loss"])
    tiny.assert_close(found.state(), expected.state(), 1e-6)
    (line,) = prepare(tiny.options("x", **given, num_towers=2)).diagnostics
    assert "runs on one device: the gradient of" in line
