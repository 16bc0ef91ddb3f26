"""Runs of models with steps, optimizers and averages of their own."""

import json

import keras
import numpy as np
import pytest
import tensorflow as tf

from towers.errors import InputError
from towers.training.evaluate import evaluate
from towers.training.loading import read_weights
from towers.training.train import train

pytestmark = pytest.mark.run

SIZE = 20
RANDOM = np.random.default_rng(0)
X = RANDOM.normal(size=(SIZE, 4)).astype(np.float32)
Y = X[:, :1] - X[:, 1:2]


def halves():
    """Two batches of 7 for the test, and a rest of 6."""
    return (X, Y), (X, Y)


def thirds():
    return (X, Y), (X[:9], Y[:9]), (X, Y)


def run(folder, model, dataset=halves, **options):
    given = dict(num_towers=2, devices="cpu", batch_size=7) | options
    return train(train_dir=str(folder), model=model, dataset=dataset, **given)


class TwoOptimizers(keras.Model):
    """A step and optimizers of its own, as of a GAN."""

    def __init__(self):
        super().__init__()
        self.one, self.two = keras.layers.Dense(4), keras.layers.Dense(1)

    def compile(self, optimizers, **rest):
        super().compile(**rest)
        self.optimizers = optimizers

    def call(self, x):
        return self.two(self.one(x))

    def train_step(self, data):
        x, y = data
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(tf.square(self(x, training=True) - y))
        weights = self.trainable_variables
        pairs = list(zip(tape.gradient(loss, weights), weights, strict=True))
        self.optimizers[0].apply_gradients(pairs[:2])
        self.optimizers[1].apply_gradients(pairs[2:])
        return {"one_loss": loss, "two_loss": loss}


class Evaluated(TwoOptimizers):
    def test_step(self, data):
        x, y = data
        return {"off_loss": tf.reduce_mean(tf.abs(self(x) - y))}


def two_optimizers(kind=Evaluated, **options):
    model = kind()
    model.compile([keras.optimizers.Adam(0.1, **options) for _ in range(2)])
    return model


@pytest.mark.extended
def test_optimizers_in_a_list_go_on_where_they_were_averages_and_all(tmp_path, capsys):
    model = lambda: two_optimizers(use_ema=True)  # noqa: E731 which are left to its step
    whole = run(tmp_path / "whole", model, max_steps=4)
    run(tmp_path / "parts", model, max_steps=2)
    parts = run(tmp_path / "parts", model, max_steps=4)
    assert parts["test_off_loss"] == whole["test_off_loss"]
    ours, theirs = (read_weights(tmp_path / name).model for name in ("whole", "parts"))
    assert all(np.array_equal(ours[name], theirs[name]) for name in ours)
    assert "no checkpoint holds" not in capsys.readouterr().out


def test_the_objective_is_a_figure_of_the_evaluation(tmp_path):
    given = dict(num_epochs=2, evaluate_every_epochs=1, keep_best=True)
    result = run(tmp_path / "run", two_optimizers, thirds, **given)
    assert result["objective"] == "validation_off_loss"
    assert result["validation_off_loss"] > 0
    assert (tmp_path / "run" / "best.json").exists()
    with pytest.raises(InputError, match="one_loss: allowed are off_loss"):
        run(tmp_path / "other", two_optimizers, thirds, objective="one_loss")


@pytest.mark.graph
def test_a_model_that_cannot_be_evaluated_is_refused_before_the_first_step(tmp_path):
    with pytest.raises(InputError, match="give it a test_step that returns a dict"):
        run(tmp_path / "run", lambda: two_optimizers(TwoOptimizers), max_steps=6)
    assert not (tmp_path / "run").exists()


class Annealed(Evaluated):
    def __init__(self):
        super().__init__()
        self.heat = tf.Variable(1.0, trainable=False, name="heat")

    def train_step(self, data):
        self.heat.assign(self.heat * 0.9)
        return super().train_step(data)


def test_a_variable_that_no_checkpoint_holds_is_told(tmp_path, capsys):
    run(tmp_path / "told", lambda: two_optimizers(Annealed), max_steps=1)
    assert "changes the variable heat:0, which no checkpoint holds" in capsys.readouterr().out


def averaging():
    model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1)])
    optimizer = keras.optimizers.SGD(0.1, use_ema=True, ema_momentum=0.98)
    model.compile(optimizer, "mse", metrics=["mae"])
    return model


def test_figures_of_a_run_that_stopped_early_are_those_of_the_averages(tmp_path):
    given = dict(num_epochs=9, early_stopping_epochs=1, objective="max:mae")
    same = lambda: ((X, Y), (X, Y), (X, Y))  # noqa: E731 the validation set is the test set
    result = run(tmp_path, averaging, same, **given)
    assert result["steps"] < 20
    assert result["validation_loss"] == pytest.approx(result["test_loss"], rel=1e-6)
    found = evaluate(train_dir=str(tmp_path), model=averaging, dataset=same, say=lambda line: None)
    assert found["loss"] == pytest.approx(result["test_loss"], rel=1e-6)


def test_the_loss_of_an_output_is_that_of_all_examples_alike(trained):
    """Of the 23 examples of the test set the last batch of 8 has 7."""
    result = json.loads((trained("two") / "result.json").read_text())
    total = 0.5 * result["test_value_loss"] + result["test_kind_loss"]
    assert total == pytest.approx(result["test_loss"], rel=1e-6)
