"""Losses that layers add: what is told of them, and `fit`; `test_equality` has the numbers."""

import keras
import numpy as np
import pytest
import tensorflow as tf

from tests import fits
from tests.builder.test_equality import Adds, sequential
from towers import TowerBuilder

X = np.random.default_rng(0).normal(size=(7, 3))
THREE = ["/cpu:0", "/cpu:1", "/cpu:2"]
layers = keras.layers
pytestmark = pytest.mark.run


def adding(*losses, **last):
    return sequential((3,), layers.Dense(3), Adds(*losses), layers.Dense(1, **last))


def test_stateless_calls_return_them_and_the_model_has_them_without_a_tape(float64):
    model, builder = adding(tf.reduce_sum, lambda x: tf.reduce_mean(x**2)), TowerBuilder(THREE)
    variables = model.trainable_variables, model.non_trainable_variables

    def losses(x):
        y, _, found = model.stateless_call(*variables, x, return_losses=True)
        return tf.reduce_mean(y**2, axis=1) + sum(found)

    expected = np.mean(losses(X))
    np.testing.assert_allclose(builder.gradients(losses, [], X)[0], expected, rtol=1e-10)
    model(X)
    expected = [float(loss) for loss in model.losses]
    builder.concat(model, X)
    np.testing.assert_allclose([float(loss) for loss in model.losses], expected, rtol=1e-10)


def test_what_cannot_be_told_is_said_and_nothing_else():
    def printed(x):
        tf.print("", end="")
        return tf.reduce_sum(x)

    def told(fn):
        found = []
        TowerBuilder(THREE[:2], on_warning=found.append).concat(Adds(fn), tf.constant(X))
        return "".join(found)

    assert not told(lambda x: tf.reduce_sum(x**2)) and not told(lambda x: tf.reduce_mean(x**3))
    assert "neither a mean nor a sum" in told(lambda x: tf.math.reduce_std(x))
    assert "could not be tried" in told(tf.function(printed))
    for value in np.inf, np.nan:
        assert "could not be tried (it is not finite" in told(
            lambda x, value=value: tf.reduce_mean(x) + value
        )


class PartsOfTheLoss(keras.Model):
    """Weighs the losses of its parts, each read where it was added, and again after the update."""

    def __init__(self):
        super().__init__()
        self.encoder = adding(tf.reduce_sum)
        self.decoder = layers.Dense(1, activity_regularizer="l1")

    def call(self, x):
        return self.decoder(self.encoder(x))

    def compute_loss(self, x=None, y=None, y_pred=None, sample_weight=None, training=True):
        of_parts = 2 * sum(self.encoder.losses) + 3 * sum(self.decoder.losses)
        return tf.reduce_mean((y_pred - y) ** 2) + of_parts + sum(self.encoder.layers[1].losses)

    def train_step(self, data):
        x, y = data
        with tf.GradientTape() as tape:
            loss = self.compute_loss(y=y, y_pred=self(x))
        gradients = tape.gradient(loss, self.trainable_variables)
        self.optimizer.apply(gradients, self.trainable_variables)
        return {"loss": loss, "encoder": sum(self.encoder.losses)}


def test_fit_has_the_losses_of_each_part():
    def build():
        model = PartsOfTheLoss()
        model.compile("sgd", "mse")
        return model

    given = {"x": X, "y": X[:, :1], "batch_size": 4, "shuffle": False}
    found = fits.fit(build, given, 2, epochs=1)
    assert not fits.differences(found, fits.fit(build, given, epochs=1))
