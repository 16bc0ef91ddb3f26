"""Keras' losses over towers: computed there, or of joined outputs, the numbers are Keras'."""

import keras
import numpy as np
import pytest
import tensorflow as tf

from tests import fits, tiny
from tests.runs import by_the_clock, released
from tests.training.test_compiled import options_of

pytestmark = pytest.mark.run
L = keras.losses
RANDOM = np.random.default_rng(0)
X = RANDOM.normal(size=(30, 4))
NUMBERS, ZERO_ONE = RANDOM.normal(size=(30, 3)), RANDOM.integers(0, 2, (30, 3)).astype(float)
CLASSES = RANDOM.integers(0, 3, 30)


def mean_squared(y, outputs):
    return tf.reduce_mean(y - outputs) ** 2 * tf.ones_like(y[:, 0])


WEIGHTS = RANDOM.uniform(0.1, 2, 30)

# {name: (what makes the loss, targets, activation, whether each example has a loss of its own)}
LOSSES = {
    "mse": (lambda: L.MeanSquaredError(), NUMBERS, None, True),
    "a square of the batch": (lambda: mean_squared, NUMBERS, None, False),
    "binary": (lambda: L.BinaryCrossentropy(label_smoothing=0.1), ZERO_ONE, "sigmoid", True),
    "sparse": (lambda: L.SparseCategoricalCrossentropy(from_logits=True), CLASSES, None, True),
    "sparse, a class ignored": (
        lambda: L.SparseCategoricalCrossentropy(True, ignore_class=1), CLASSES, None, False
    ),
    "a sum": (lambda: L.MeanSquaredError(reduction="sum"), NUMBERS, None, True),
    "a mean of weights": (
        lambda: L.MeanSquaredError(reduction="mean_with_sample_weight"), NUMBERS, None, False
    ),
    "dice of each example": (lambda: L.Dice(axis=1), ZERO_ONE, "sigmoid", True),
    "a function": (lambda: lambda y, said: tf.norm(y - said, axis=1), NUMBERS, None, False),
    "two": (
        lambda: {"a": "mse", "b": L.Huber(reduction="sum")}, {"a": NUMBERS, "b": X}, None, True
    ),
}  # fmt: skip
FEW = ("sparse", "a mean of weights", "two")


def build(name):
    def model():
        make_loss, targets, activation, _ = LOSSES[name]  # made in the precision of the run
        x = inputs = keras.Input([4])
        x = keras.layers.Dense(5, "tanh", kernel_regularizer="l2")(x)
        if isinstance(targets, dict):
            sizes = {part: own.shape[1] for part, own in targets.items()}
            outputs = {part: keras.layers.Dense(n, name=part)(x) for part, n in sizes.items()}
            more = {"loss_weights": {"a": 0.3, "b": 2.0}, "metrics": {"a": ["mae"]}}
        else:
            outputs = keras.layers.Dense(3, activation)(x)
            more = {"metrics": ["accuracy" if targets is CLASSES else "mae"]}
        built = keras.Model(inputs, outputs)
        built.compile(keras.optimizers.Adam(0.01, clipnorm=0.1), make_loss(), **more)
        return built

    def data():
        targets = LOSSES[name][1]
        weights = tf.nest.map_structure(lambda _: WEIGHTS, targets)
        parts = (slice(0, 20), slice(20, 30))
        return tuple(
            tf.nest.map_structure(lambda a, p=part: a[p], (X, targets, weights)) for part in parts
        )

    return model, data


@pytest.mark.parametrize("name", released(LOSSES, *FEW))
def test_steps_are_those_of_keras(name):
    model, data = build(name)
    loop = tiny.Loop(
        options_of(model=model, dataset=data, dtype="float64", num_towers=2, batch_size=10)
    )
    with fits.in_float64():
        keras.utils.set_random_seed(0)
        alone = model()
        for (x, y, weights), _ in loop.run.data.train.train_batches(10, seed=0).take(2):
            logs = alone.train_on_batch(x, y, weights, return_dict=True)
            alone.reset_metrics()
    found = loop(2)
    assert loop.run.task.by_example is LOSSES[name][3]
    assert found["loss"] + found["penalty"] == pytest.approx(logs.pop("loss"), rel=1e-6)
    assert {n: found[f"batch/{n}"] for n in logs} == pytest.approx(logs, rel=1e-6)
    pairs = zip(loop.train_state.model.weights, alone.weights, strict=True)
    for ours, theirs in pairs:
        np.testing.assert_allclose(ours.numpy(), theirs.numpy(), rtol=1e-9, atol=1e-12)


@by_the_clock
def test_the_loss_of_each_tower_is_that_of_its_rows():
    model, data = build("sparse")
    loop = tiny.Loop(options_of(model=model, dataset=data, num_towers=3, batch_size=10))
    (x, y, weights), _ = next(iter(loop.run.data.train.train_batches(10, seed=0)))
    network, loss = loop.train_state.model, LOSSES["sparse"][0]()
    rows = slice(0, 4), slice(4, 7), slice(7, 10)
    by_hand = [float(loss(y[own], network(x[own]), weights[own])) for own in rows]
    found = loop.loop(loop.batches, tf.constant(1))
    assert found["tower_loss"].numpy() == pytest.approx(by_hand, rel=1e-5)
    assert float(found["gather_seconds"]) >= 0
    assert found["tower_gradient_norm"].numpy().all()


def test_copies_on_towers_are_updated_alike():
    """By an optimizer that decays some weights and not others."""
    model, data = build("sparse")

    def decaying():
        built = model()
        optimizer = keras.optimizers.AdamW(0.01, weight_decay=0.1, clipnorm=0.1)
        optimizer.exclude_from_weight_decay(var_names=["bias"])
        built.optimizer = optimizer
        return built

    given = dict(model=decaying, dataset=data, dtype="float64", num_towers=2, batch_size=10)
    once, copied = (
        tiny.Loop(options_of(**given, variables=variables)) for variables in ("cpu", "replicated")
    )
    assert once(3) == pytest.approx(copied(3), rel=1e-9)
    tiny.assert_close(copied.state(), once.state(), 1e-12)
    first, *others = (dict(enumerate(own.variables())) for own in copied.train_state.replicas)
    for copy in others:
        tiny.assert_close(copy, first, 1e-15)
